"""Run `dne-train`: parse its options, run its commands and print what they return."""

from trainer.cli.parser import build_parser, main

__all__ = ["build_parser", "main"]
