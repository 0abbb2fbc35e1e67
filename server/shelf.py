"""Several models, of which those in use are loaded.

Owns: Shelf: when a model is loaded, how long it stays, which one goes for another. Must not know:
HTTP beyond ApiError, how models load, what is done with them.

One model is loaded or unloaded at a time; requests for those that are there do not wait for that.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI

from ..runtime.errors import NotEnoughMemory
from ..runtime.machine import give_back_freed
from .errors import ApiError
from .facts import ModelFacts
from .lifecycle import RETRY_AFTER_S, Lifecycle
from .service import Service


@dataclass(frozen=True)
class Loaded:
    """A model that answers."""

    app: FastAPI
    service: Service
    close: Callable[[], None]


@dataclass
class Place:
    """A model that may be asked for."""

    name: str
    need_bytes: int
    """What it takes in memory once it is loaded."""
    facts: ModelFacts
    load: Callable[[Lifecycle], Loaded]
    loaded: Loaded | None = None
    n_users: int = 0
    left_s: float = 0.0
    """When its last user went, by the monotonic clock."""
    keep_alive_s: float = math.inf
    """How long it stays from then on."""

    @property
    def is_idle(self) -> bool:
        return self.loaded is not None and not self.n_users

    @property
    def is_broken(self) -> bool:
        """Its engine has ended by itself, and will answer nothing any more."""
        return self.loaded is not None and not self.loaded.service.engine.is_alive

    @property
    def stays_s(self) -> float:
        """Seconds from now until it goes, if nobody asks for it."""
        gone_s = 0.0 if self.n_users else time.monotonic() - self.left_s
        return max(self.keep_alive_s - gone_s, 0.0)


class Shelf:
    """Used from one event loop; loading and closing happen in threads beside it."""

    def __init__(
        self,
        places: Sequence[Place],
        *,
        keep_alive_s: float | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """The first place is for requests that name none. keep_alive_s: how long a model stays
        without a request, where the last one to say so says nothing else; None: until its memory is
        needed. max_bytes: of all loaded ones."""
        self.places = {place.name: place for place in places}
        self.default = places[0].name
        self.lifecycle = Lifecycle()
        self._keep_alive_s = math.inf if keep_alive_s is None else keep_alive_s
        self._max_bytes = max_bytes
        self._changing = asyncio.Lock()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, name: str | None) -> Place:
        """Raises ApiError 404."""
        place = self.places.get(name or self.default)
        place = place or self.places.get((name or "").removesuffix(":latest"))
        if place is None:
            message = f"the model is not served here; this server has {', '.join(self.places)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return place

    @asynccontextmanager
    async def use(self, place: Place, keep_alive_s: float | None = None) -> AsyncIterator[Loaded]:
        """Loads it where needed; it stays for as long as this lasts, and for keep_alive_s after
        that; None: as long as was said before. Raises ApiError and what loading raises."""
        if place.loaded is None or place.is_broken:
            async with self._changing:
                await self._load(place)
                place.n_users += 1
        else:
            place.n_users += 1
        self._stop_timer(place)
        if keep_alive_s is not None:
            place.keep_alive_s = keep_alive_s
        try:
            assert place.loaded is not None
            yield place.loaded
        finally:
            place.n_users -= 1
            self._left(place)

    async def let_go(self, place: Place) -> None:
        """Unloads it, as soon as nobody uses it."""
        place.keep_alive_s = 0.0
        self._stop_timer(place)
        await self._unload_if_idle(place)

    def close(self) -> None:
        """Ends all answers. From any thread, when nothing is loaded any more."""
        for place in self.places.values():
            if place.loaded:
                place.loaded.close()

    async def _load(self, place: Place) -> None:
        if place.is_broken and place.is_idle:
            await self._unload(place)
        if place.loaded is None:  # another request may have loaded it meanwhile
            await self._make_room(place)
            place.loaded = await self._loaded(place)
            place.facts = place.loaded.service.facts
            place.keep_alive_s = self._keep_alive_s

    async def _make_room(self, place: Place) -> None:
        if self._max_bytes is None:
            return
        if place.need_bytes > self._max_bytes:
            raise ApiError(
                400,
                f"{place.name} takes {place.need_bytes} bytes, this server gives all its models"
                f" {self._max_bytes}",
                param="model",
                code="model_too_large",
            )
        while self._held_bytes() + place.need_bytes > self._max_bytes:
            if not await self._unload_one():
                raise ApiError(
                    503,
                    f"no memory for {place.name} while other models answer; try again later",
                    "unavailable_error",
                    code="model_memory_full",
                    headers={"Retry-After": RETRY_AFTER_S},
                )

    async def _loaded(self, place: Place) -> Loaded:
        """Idle models go where the system itself has too little memory for this one."""
        while True:
            try:
                return await asyncio.to_thread(place.load, self.lifecycle)
            except NotEnoughMemory:
                if not await self._unload_one():
                    raise

    async def _unload_one(self) -> bool:
        """The longest idle one; False where none is."""
        idle = [other for other in self.places.values() if other.is_idle]
        if idle:
            await self._unload(min(idle, key=lambda other: other.left_s))
        return bool(idle)

    def _held_bytes(self) -> int:
        return sum(place.need_bytes for place in self.places.values() if place.loaded)

    async def _unload(self, place: Place) -> None:
        if place.loaded:
            close, place.loaded = place.loaded.close, None
            await asyncio.to_thread(close)
            del close
            # An engine and what it holds refer to each other, and a vocabulary may be large.
            await asyncio.to_thread(gc.collect)
            await asyncio.to_thread(give_back_freed)

    def _left(self, place: Place) -> None:
        place.left_s = time.monotonic()
        if place.is_idle and place.keep_alive_s < math.inf:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(place.keep_alive_s, self._expire, place)
            self._timers[place.name] = timer

    def _stop_timer(self, place: Place) -> None:
        if timer := self._timers.pop(place.name, None):
            timer.cancel()

    def _expire(self, place: Place) -> None:
        task = asyncio.ensure_future(self._unload_if_idle(place))
        self._tasks.add(task)  # the loop itself keeps none of them
        task.add_done_callback(self._tasks.discard)

    async def _unload_if_idle(self, place: Place) -> None:
        async with self._changing:
            if place.is_idle:
                await self._unload(place)
