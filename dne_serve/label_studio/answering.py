"""Answer tasks of Label Studio with predictions of the served version.

Only pictures of the inbox are answered. Nothing is fetched, whatever address a task has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dne_serve.errors import tell
from dne_serve.http.uploads import Upload
from dne_serve.inference.answers import probabilities_of
from dne_serve.rollout.canary import Chosen
from dne_serve.server import Serving
from model_store.errors import ImageRejected, ItemNotFound, RecordInvalid, StoreUnsupported
from model_store.inbox.inbox import Inbox
from model_store.inbox.reading import in_threads
from model_store.label_studio.label_config import Controls
from model_store.label_studio.tasks import is_same_picture, item_of, prediction
from model_store.records.inbox import ItemRecord

NOT_OURS = "no image of the inbox is named by this task: `dne-train label-studio push` makes tasks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The item of a task, with its picture where the served version has not answered it yet."""

    item: ItemRecord
    picture: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """One request. All its tasks are answered by one version."""

    serving: Serving
    chosen: Chosen
    controls: Controls

    async def answer(self, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Answer the tasks in order, as many at a time as a request may have images."""
        size = self.serving.settings.max_images
        results: list[dict[str, Any]] = []
        for start in range(0, len(tasks), size):
            results += await self._answer_some(tasks[start : start + size])
        return results

    async def _answer_some(self, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        found = await self.serving.readers.run(lambda: self._find_all(tasks))
        pictures = [one.picture for one in found if isinstance(one, Found) and one.picture]
        scored = iter(await self._score(pictures))
        return [self._result(one, scored) for one in found]

    def _find_all(self, tasks: Sequence[dict[str, Any]]) -> list[Found | str]:
        inbox = self.serving.desk.inbox
        return list(in_threads(lambda one: self._find(inbox, one), tasks))

    def _find(self, inbox: Inbox, data: dict[str, Any]) -> Found | str:
        """Find the item of a task, or say why there is none."""
        name = item_of(data, image_key=self.controls.image_key)
        if name is None:
            return NOT_OURS
        try:
            item = inbox.item(name)
            if not is_same_picture(data, item):
                return f"the task is about another picture than item {name} has"
            is_known = item.version == self.chosen.resident.version
            return Found(item=item, picture=None if is_known else inbox.picture(item))
        except (ItemNotFound, RecordInvalid, StoreUnsupported) as error:
            return tell(error)

    async def _score(self, pictures: Sequence[bytes]) -> list[tuple[str, float] | str]:
        """Compute the likeliest class of each picture, or say why it has none."""
        if not pictures:
            return []
        uploads = [Upload(filename=None, data=one) for one in pictures]
        try:
            scored = await self.serving.predictor.score(
                self.chosen, pictures=uploads, is_traffic=False
            )
        except ImageRejected as error:
            if len(pictures) == 1:
                return [tell(error)]
            return [answer for one in pictures for answer in await self._score([one])]
        resident, answers = self.chosen.resident, list[tuple[str, float] | str]()
        for one in scored:
            scores = probabilities_of(resident, one.logits)
            best = int(scores.argmax())
            answers.append((resident.labels[best], float(scores[best])))
        return answers

    def _result(
        self, found: Found | str, scored: Iterator[tuple[str, float] | str]
    ) -> dict[str, Any]:
        if isinstance(found, str):
            return {"error": found}
        answer = next(scored) if found.picture else _kept(found.item)
        if isinstance(answer, str):
            return {"error": answer}
        label, score = answer
        if not self.controls.offers(label):
            return {
                "error": f"the project does not offer the class {label!r}: "
                'use <Choices … value="$classes">, which takes the classes from the task'
            }
        version = self.chosen.resident.version
        return prediction(self.controls, label=label, score=score, version=version)


def _kept(item: ItemRecord) -> tuple[str, float]:
    return item.answer.label, item.answer.score
