"""Remember the last answers and their times, and compare them with the held-out images."""
