"""Tell the whole story on real digits, with the commands and over HTTP as anyone would."""

import argparse
from pathlib import Path

from model_store.command_line import Parser


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="dne demo",
        description="Learns handwritten digits in three tasks, serves them while they appear, "
        "rolls back and resumes. Takes two to three minutes on two cores.",
        epilog="Needs scikit-learn, which has the digits: pip install 'dne-serve[demo]'.",
    )
    made.add_argument("--port", type=int, default=8000, help="where to serve (default: 8000)")
    made.add_argument(
        "--folder",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="where to keep what is made; a demo's folder is made anew (default: demo)",
    )
    return made
