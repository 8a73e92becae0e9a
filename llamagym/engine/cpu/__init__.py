"""What makes the engine fast on a processor. `LLAMAGYM_CPU_KERNELS=0` switches it off."""
