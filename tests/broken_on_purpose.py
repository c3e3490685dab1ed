"""Break each contract of the design, in a copy, and see its test fail: the suite `contracts`.

A test that passes while the property is broken asserts nothing. The copy is a temporary folder:
the checkout is not touched.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("dne_serve", "trainer", "model_store", "tests", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Break:
    contract: str
    file: str
    right: str
    wrong: str
    test: str


BREAKS = (
    Break(
        "1 frozen is frozen",
        "model_store/network/network.py",
        "            expert.freeze()\n",
        "            expert.train()\n",
        "tests/model_store/network/test_network.py::"
        "test_gradients_agree_with_plain_loops_and_are_zero_for_everything_frozen",
    ),
    Break(
        "1 old features bit-identical",
        "model_store/network/layers.py",
        "    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)",
        "    product = (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], -1)\n"
        "    return product * (1 + 1e-6 * matrix.requires_grad)",
        "tests/model_store/network/test_network.py::"
        "test_old_features_are_bit_identical_after_any_number_of_expansions",
    ),
    Break(
        "1 an adapted expert's own weights stay",
        "trainer/growth/low_rank.py",
        "    expert.requires_grad_(False)\n    for parent, name, layer in list(_layers(expert)):\n",
        "    expert.requires_grad_(True)\n    for parent, name, layer in list(_layers(expert)):\n",
        "tests/trainer/growth/test_low_rank.py::test_the_weights_below_a_change_stay_to_the_bit",
    ),
    Break(
        "1 an adapted version names an expert of its own",
        "trainer/versions/version_draft.py",
        '    tasks = (first.model_copy(update={"expert": expert}), *others)\n',
        "    tasks = (first, *others)\n",
        "tests/trainer/start/test_grow.py::test_older_versions_keep_their_expert_to_the_bit",
    ),
    Break(
        "1 versions that read other blocks of an expert share no pass",
        "dne_serve/engines/base.py",
        "    path: ExpertPath = (manifest.spec.until(0),)\n",
        "    path: ExpertPath = ()\n",
        "tests/dne_serve/engines/test_mixed_versions.py::"
        "test_versions_that_read_other_blocks_of_one_expert_answer_as_if_alone",
    ),
    Break(
        "2 merged as learnt",
        "trainer/growth/low_rank.py",
        "            change = SCALE * self.up.double() @ self.down.double()\n",
        "            change = self.up.double() @ self.down.double()\n",
        "tests/trainer/growth/test_low_rank.py::test_merged_weights_answer_as_the_change_did",
    ),
    Break(
        "1 the folded form reads earlier blocks as the reference does",
        "model_store/inference/forward.py",
        "        return [read_rows(x_SBPC[0],",
        "        return [1.0001 * read_rows(x_SBPC[0],",
        "tests/model_store/network/test_readout.py::test_the_folded_form_reads_the_same",
    ),
    Break(
        "1 a readout of a frozen expert stays",
        "model_store/network/network.py",
        "                earlier += self.readout.read(layer + 1, states[0])\n",
        "                earlier += self.readout.read(layer + 1, states[-1])\n",
        "tests/model_store/network/test_readout.py::"
        "test_a_readout_stays_bit_identical_while_the_network_grows",
    ),
    Break(
        "2 the graph reads earlier blocks as torch does",
        "model_store/onnx/graph.py",
        "self._w, self._spec, self._shares[block].numpy()",
        "self._w, self._spec, self._shares[block].numpy()[::-1].copy()",
        "tests/trainer/growth/test_low_rank.py::"
        "test_the_folded_form_and_onnx_agree_with_a_merged_expert",
    ),
    Break(
        "2 save, load, the same logits",
        "model_store/codec.py",
        "np.ascontiguousarray(tensor.detach().cpu().numpy())",
        "np.ascontiguousarray(tensor.detach().half().float().cpu().numpy())",
        "tests/model_store/test_codec.py::test_the_logits_are_the_same_in_another_process",
    ),
    Break(
        "3 shards first, manifest last",
        "model_store/store/publish.py",
        "            _write_shards(store, draft, shards=shards)\n"
        "            _leave_forgotten(store, draft, shards=shards)\n"
        "            return _write_manifest(store, draft, signer=signer)\n",
        "            manifest = _write_manifest(store, draft, signer=signer)\n"
        "            _write_shards(store, draft, shards=shards)\n"
        "            return manifest\n",
        "tests/faults/test_store_survives.py::"
        "test_a_kill_before_any_system_call_of_a_publish_leaves_whole_versions_only",
    ),
    Break(
        "4 create-if-absent",
        "model_store/backends/local.py",
        "        os.link(temporary, name, src_dir_fd=source, dst_dir_fd=target, "
        "follow_symlinks=False)\n",
        "        os.rename(temporary, name, src_dir_fd=source, dst_dir_fd=target)\n",
        "tests/model_store/backends/test_objects.py",
    ),
    Break(
        "5 bytes are never trusted",
        "model_store/store/shard.py",
        "    if digest != ref.sha256:\n",
        "    if False:\n",
        "tests/model_store/store/test_store.py",
    ),
    Break(
        "6 a request has one version",
        "dne_serve/http/routes.py",
        "    uploads = await read_uploads(request, max_images=serving.settings.max_images)\n"
        "    watch =",
        "    uploads = await read_uploads(request, max_images=serving.settings.max_images)\n"
        "    chosen = await serving.predictor.resolve(version, at_least=at_least_of(request))\n"
        "    watch =",
        "tests/dne_serve/rollout/test_live_reload.py::test_a_request_keeps_the_version_it_began_with",
    ),
    Break(
        "6 a request of the Open Inference Protocol has one version",
        "dne_serve/protocol_v2/infer.py",
        "    scored = await serving.predictor.score(chosen, pictures=pictures, since=since)\n",
        "    scored = await serving.predictor.score(chosen, pictures=pictures, since=since)\n"
        "    resident = (await _resolve(serving, version, at_least=None)).resident\n",
        "tests/dne_serve/protocol_v2/test_infer.py::test_a_request_keeps_the_version_it_began_with",
    ),
    Break(
        "7 a failed load keeps the old version",
        "dne_serve/rollout/reloader.py",
        "                self._fall_back(store, failure)\n            raise\n",
        "                self._fall_back(store, failure)\n"
        "            self._loaded._served = None\n            raise\n",
        "tests/dne_serve/rollout/test_live_reload.py::"
        "test_a_flipped_bit_keeps_the_old_version_serving_and_says_so",
    ),
    Break(
        "8 a rollback stays",
        "model_store/store/channel.py",
        'head.mode == "pin"',
        'head.mode == "never"',
        "tests/trainer/test_cli.py::"
        "test_a_pinned_channel_ends_with_3_and_the_command_that_would_promote",
    ),
    Break(
        "9 loading costs the delta",
        "dne_serve/engines/torch_engine.py",
        "needed = manifest.model_shards[len(known) :]",
        "needed = manifest.model_shards",
        "tests/dne_serve/rollout/test_live_reload.py::test_loading_the_next_version_reads_only_the_delta",
    ),
    Break(
        "9 publishing costs the delta",
        "model_store/store/publish.py",
        "        if ref.sha256 not in shards and ref not in inherited:\n",
        "        if ref.sha256 not in shards:\n",
        "tests/model_store/store/test_publish.py::test_publishing_a_child_touches_only_what_is_new",
    ),
)


def main() -> int:
    missed = 0
    for one in BREAKS:
        caught = _is_caught(one)
        missed += not caught
        print(f"{'caught' if caught else 'MISSED':7} {one.contract:40} {one.file}", flush=True)
    print(f"{len(BREAKS) - missed} passed, {missed} failed")
    return 1 if missed else 0


def _is_caught(one: Break) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / name, ignore=ignored)
            else:
                shutil.copy(source, copy / name)
        path = copy / one.file
        text = path.read_text()
        if text.count(one.right) != 1:
            raise SystemExit(f"{one.file} has changed: the break of contract {one.contract} is old")
        path.write_text(text.replace(one.right, one.wrong))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", one.test]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
        return done.returncode == 1 and " failed" in done.stdout


if __name__ == "__main__":
    sys.exit(main())
