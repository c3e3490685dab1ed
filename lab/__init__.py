"""Compare methods of class-incremental learning in one harness."""
