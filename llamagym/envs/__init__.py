"""Text worlds as Gymnasium environments; each needs a package of its own, an extra of this one."""
