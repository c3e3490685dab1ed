"""What the README says about other servers is what was measured."""

from __future__ import annotations

import json

from benchmarks.serving.tables import RESULTS, comparison, photos
from tests.packaging.project import ROOT


def test_the_comparison_in_the_readme_is_made_from_the_result() -> None:
    result = json.loads((RESULTS / "serving.json").read_text())
    assert comparison(result) in (ROOT / "README.md").read_text()


def test_the_rates_of_photos_in_the_readme_are_those_of_the_result() -> None:
    measured = json.loads((RESULTS / "photos.json").read_text())["measured"]
    readme = (ROOT / "README.md").read_text()
    for server in ("dne-serve", "LitServe, onnxruntime int8", "LitServe, onnxruntime"):
        cells = []
        for network in ("dinov2", "vit_tiny"):
            asked = f"requests/s, {network}, 0.3 megapixels, {server}, "
            rates = (measured[f"{asked}{count} connections"] for count in (1, 8, 32))
            cells.append(" / ".join(f"{rate:.0f}" for rate in rates))
        assert f"| {' | '.join(cells)} |" in readme


def test_photos_have_a_row_for_every_network_and_server_the_cheapest_first() -> None:
    measured: dict[str, float] = {}
    for name, ms in (("LitServe, PyTorch", 113.0), ("dne-serve", 25.0)):
        for size, connections in (
            ("0.3 megapixels", 1),
            ("0.3 megapixels", 8),
            ("0.3 megapixels", 32),
            ("12 megapixels", 8),
        ):
            what = f"dinov2, {size}, {name}, {connections} connections"
            measured[f"requests/s, {what}"] = 1000 / ms + connections
            measured[f"processor ms, {what}"] = ms
            measured[f"failed, {what}"] = 1.0
    *head, ours, theirs = photos({"measured": measured}).splitlines()
    assert len(head) == 2
    assert ours == "| dinov2, **dne-serve** | 41.0 / 48.0 / 72.0 | 25 | 48.0, 25 | 4 |"
    assert theirs == "| dinov2, LitServe, PyTorch | 9.8 / 16.8 / 40.8 | 113 | 16.8, 113 | 4 |"
