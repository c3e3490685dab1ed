"""Keep uvicorn from reading on while requests that were sent ahead are waiting."""

from __future__ import annotations

from uvicorn.protocols.http.flow_control import FlowControl


class HeldFlow(FlowControl):
    """Flow control that reads no more while it is held, even if uvicorn resumes it."""

    _is_held = False

    def hold(self, held: bool) -> None:
        if held:
            self.pause_reading()
        is_over, self._is_held = self._is_held and not held, held
        if is_over:
            self.resume_reading()

    def resume_reading(self) -> None:
        if not self._is_held:
            super().resume_reading()
