"""Find labels that wait for learning, and keep the jobs that ask a trainer for it."""
