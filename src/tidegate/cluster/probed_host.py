"""A broker's host whose layers can be scaled while a probe watches, which uses the broker as any client does."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from tidegate.client import connect
from tidegate.cluster.outcome import Outcome
from tidegate.cluster.probe import Probe
from tidegate.errors import Overloaded, TidegateError
from tidegate.layers.embedded_host import BrokerHost

log = logging.getLogger(__name__)


class ProbedHost(BrokerHost):
    """`address` is where clients reach the broker, once they do; `token` is what it wants of them."""

    address = ""
    token: str | None = None
    _is_scaling = False
    _probe: Probe | None = None

    async def scale(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Changes how many slices the named layers have; what became of it, once it is done."""
        if self._is_scaling:
            raise Overloaded("L660", "the layers are being changed already", "wait until that is done")
        self._is_scaling = True
        try:
            async with AsyncExitStack() as stack:
                self._probe = await self._begin_probe(stack)
                outcome = await self._change_layers(counts, self._probe)
        finally:
            self._is_scaling, self._probe = False, None
        return outcome.to_dict()

    def scaling(self) -> dict[str, Any]:
        """What a probe has seen until now of a change that is under way; nothing when there is none."""
        if self._probe is None:
            return {}
        seen = self._probe.findings()
        longest_s = max(seen.delays_s, default=0.0)
        return {
            "scaling": {
                "probes": len(seen.sent_s),
                "longest_delay_ms": round(longest_s * 1000, 1),
                "doubled": seen.doubled,
                "disordered": seen.disordered,
            }
        }

    @abstractmethod
    async def _change_layers(self, counts: Mapping[str, int], probe: Probe | None) -> Outcome: ...

    async def _begin_probe(self, stack: AsyncExitStack) -> Probe | None:
        """None where a program on this machine cannot be a client, such as for want of a certificate."""
        try:
            client = await stack.enter_async_context(connect(self.address, name="tidegate-probe", token=self.token))
            return await stack.enter_async_context(Probe(client))
        except TidegateError as error:
            log.warning("the layers are changed without a probe: %s", error)
            return None
