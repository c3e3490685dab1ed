"""Build a student from its parent and teach it: losses, loop, classifier, checkpoints."""
