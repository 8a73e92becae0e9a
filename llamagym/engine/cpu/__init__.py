"""Kernels that make the engine faster on a CPU. `LLAMAGYM_CPU_KERNELS=0` switches them off."""
