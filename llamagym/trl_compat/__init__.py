"""Classes with the interface of TRL 0.11."""
