"""Let a name of the documents stand for a made-up tower: no digest of the real one is expected.

Python imports this at its start, where `tests.docs.reader` puts the folder on the path.
"""

from dataclasses import replace

from trainer.backbones import known

known.KNOWN = tuple(replace(one, sha256=None, revision=None) for one in known.KNOWN)
