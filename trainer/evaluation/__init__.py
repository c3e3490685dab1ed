"""Measure a network on labelled images: accuracy, calibration, unknown images, gate, cost."""
