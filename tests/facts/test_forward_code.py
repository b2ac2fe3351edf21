"""Test the reader of an engine's code, which judges the table of the adapters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from forward_code import calls

NPU, THRESHOLD = False, 4


class _Module(SimpleNamespace):
    """A module with the attributes that are given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(rotary_emb=object(), **attributes)


class _Always(_Module):
    def forward(self, x: Any) -> Any:
        return self.attn(*self.rotary_emb(x))


class _Windowed(_Module):
    def forward(self, x: Any) -> Any:
        if self.v1 or self.window:
            x = self.rotary_emb(x)
        return self.attn(x)


class _Nested(_Module):
    """Reaches the call over two methods, behind an early return for empty batches."""

    def prepare(self, x: Any) -> Any:
        if x.shape[0] == 0:
            return x, None
        return (self.native(x) if not NPU else self.npu(x)), x

    def native(self, x: Any) -> Any:
        if self.config.kind != "alibi" and self.number % 2 < THRESHOLD:
            return self.rotary_emb(x)
        return x

    def npu(self, x: Any) -> Any:
        return x

    def forward(self, x: Any) -> Any:
        return self.attn(self.prepare(x))


class _Compared(_Module):
    def forward(self, x: Any) -> Any:
        if not self.size >= THRESHOLD:
            return self.attn(x)
        with self.lock:
            x = self.rotary_emb(x)
        return self.attn(x)


class _Fused(_Module):
    def forward(self, x: Any) -> Any:
        use_fused = self.fused and x.dtype == "bfloat16"
        if use_fused:
            fused_norm_rope(x, self.rotary_emb.cos_sin_cache)  # type: ignore[name-defined] # noqa: F821
        else:
            x = self.rotary_emb(x)
        return self.attn(x)


class _Raising(_Module):
    def forward(self, x: Any) -> Any:
        if x is None:
            raise ValueError(x)
        assert self.rotary_emb is not None
        x = self.rotary_emb(x) if self.use else x
        return self.attn(x)


class _Aliased(_Module):
    def forward(self, x: Any) -> Any:
        rotate = self.rotary_emb
        if self.use:
            x = rotate(x)
        return self.attn(x)


class _Looping(_Module):
    def forward(self, x: Any) -> Any:
        for part in x:
            self.rotary_emb(part)
        return self.attn(x)


class _Local(_Module):
    def forward(self, x: Any) -> Any:
        use = self.number % 2
        if use:
            x = self.rotary_emb(x)
        return self.attn(x)


class _Other(_Module):
    """Another child may rotate, and only some layers use the known one."""

    def forward(self, x: Any) -> Any:
        return self.attn(self.kernel_rope(x) if self.kernel else self.rotary_emb(x))


class _Whole(_Module):
    def forward(self, x: Any) -> Any:
        if self.use:
            x = self.rotary_emb(x)
        return attend(self, x)  # type: ignore[name-defined] # noqa: F821


class _Inherited(_Windowed):
    def forward(self, x: Any) -> Any:
        if self.v1:
            self.rotary_emb(x)
        return super().forward(x)


class _Decorated(_Module):
    @staticmethod
    def forward(x: Any) -> Any:
        return x


class _Recursive(_Module):
    def forward(self, x: Any) -> Any:
        if self.use:
            self.rotary_emb(x)
        return self.forward(x)


class _Silent(_Module):
    def forward(self, x: Any) -> Any:
        return self.attn(x)


ALIBI, ROPE = SimpleNamespace(kind="alibi"), SimpleNamespace(kind="rope")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (_Always(), True),
        (_Windowed(v1=False, window=None), False),
        (_Windowed(v1=False, window=0), False),
        (_Windowed(v1=False, window=64), True),
        (_Windowed(v1=True), True),
        (_Windowed(v1=False), None),
        (_Windowed(v1=False, window=[]), None),  # The truth of a list is code of the engine.
        (_Nested(config=ALIBI), False),
        (_Nested(config=ROPE), None),
        (_Compared(size=4), True),
        (_Compared(size=3), False),
        (_Compared(size=None), None),
        (_Fused(fused=True), True),
        (_Raising(use=True), True),
        (_Raising(use=False), False),
        (_Aliased(use=False), None),
        (_Looping(), None),
        (_Local(number=4), None),
        (_Other(kernel=None), True),
        (_Other(kernel=object()), None),
        (_Whole(use=False), None),
        (_Whole(use=True), True),
        (_Inherited(v1=False, window=None), None),
        (_Decorated(), None),
        (_Recursive(use=False), None),
        (_Silent(), None),
        (_Module(), None),
        (_Always(forward=print), None),
    ],
)
def test_calls_follow_conditions_of_attributes(module: Any, expected: bool | None) -> None:
    """Conditions that only a run would decide make the result unknown, unless all ways agree."""
    assert expected is calls(module, "rotary_emb")
