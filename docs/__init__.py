"""Make the pages and drawings that come from the code: `make docs`."""
