"""The simulated host of elastic layers: slices, coordinators and brokers join, leave, crash, are suspended and resume,
while clients publish and subscribe. Otherwise it is like `simulated_world`, whose laws must hold here too.

`ElasticWorld(seed).run()` runs a simulation, and a failing seed replays exactly. The seed also chooses the speed of
each channel, how often the configuration changes, and whether anything dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from simulated_world import World

from tidegate.layers import matcher as matchers
from tidegate.layers.access_point import AccessPoint
from tidegate.layers.connection_point import Bounds, ConnectionPoint
from tidegate.layers.control import Buried, Entry, Fence, ReadShare, Retire, Share
from tidegate.layers.coordinator import Coordinator
from tidegate.layers.exit_point import ExitPoint
from tidegate.layers.frames import Change, ChangeOk, Deliver, Outputs
from tidegate.layers.matcher import Matcher
from tidegate.layers.reconfiguration import State, is_abortable, lost
from tidegate.layers.selector import Configuration
from tidegate.layers.session_events import Output, PublishAcknowledged, SessionEvent, SubscriptionEnded
from tidegate.layers.slice import Slice
from tidegate.layers.subscription_table import CONNECTION_POINT_SHIFT, connection_point_number, is_connection_point

REGISTRY = "registry"
REST_STEPS = 60_000
# Few, so that moving a share takes several steps.
MOVED_AT_ONCE = 2
LAYERS = {"access-point": 3, "matcher": 4, "exit-point": 3}


class SimulatedRegistry(Slice):
    """A durable and linearizable registry: it does not crash, and answers one request at a time."""

    def __init__(self) -> None:
        super().__init__(REGISTRY)
        self.kept: dict[int, tuple[int, bytes]] = {}

    def on_change(self, source: str, frame: Change, now_s: float) -> Outputs:
        version = self.kept.get(frame.subscription, (0, b""))[0]
        if frame.version > version:
            if frame.filter is not None:
                self.kept[frame.subscription] = (frame.version, frame.filter)
            else:
                self.kept.pop(frame.subscription, None)
        return [(source, ChangeOk(frame.subscription, frame.version))]

    def on_fence(self, source: str, frame: Fence, now_s: float) -> Outputs:
        for name in filter(is_connection_point, frame.dead):
            self.bury(name)
        return super().on_fence(source, frame, now_s)

    def on_buried(self, source: str, frame: Buried, now_s: float) -> Outputs:
        self.bury(frame.connection_point)
        return []

    def bury(self, name: str) -> None:
        dead = connection_point_number(name)
        self.kept = {number: kept for number, kept in self.kept.items() if number >> CONNECTION_POINT_SHIFT != dead}

    def on_read_share(self, source: str, frame: ReadShare, now_s: float) -> Outputs:
        new, base, dead = frame.transaction.new, frame.transaction.base, frame.transaction.dead
        entries = [
            Entry(subscription, version, packed)
            for subscription, (version, packed) in self.kept.items()
            if base.owner(subscription) in dead and new.owner(subscription) == source
        ]
        return [
            (source, Share(frame.transaction, entries[:1], is_last=False)),
            (source, Share(frame.transaction, entries[1:], is_last=True)),
        ]


class SimulatedStore:
    """Keeps the state of the coordinators."""

    def __init__(self, state: State) -> None:
        self.state = state

    def load(self) -> State:
        return self.state

    def replace(self, state: State) -> bool:
        if state.term < self.state.term:
            return False
        self.state = state
        return True


class ElasticWorld(World):
    def __init__(
        self, seed: int, *, crashes: bool = False, buffered: bool = False, rebinds: bool = True, brokers: bool = True
    ) -> None:
        super().__init__(seed)
        self.rebinds = rebinds
        self.brokers = brokers  # die and join
        rng = self.rng
        self.crashes_left = rng.randint(1, 4) if crashes else 0
        self.laziness = rng.choice([(0.0,), (0.0, 0.0, 0.5, 0.9), (0.0, 0.0, 0.0, 0.97, 0.99)])
        self.lazy: dict[tuple[str, str], float] = {}
        self.made = {layer: len(getattr(self.configuration, layer.replace("-", "_") + "s")) for layer in LAYERS}
        is_empty = seed % 11 == 3  # some worlds begin without slices
        for name in self.configuration.slices:
            del self.slices[name]
            if not is_empty:
                self.slices[name] = self.make(name, self.configuration)
        if is_empty:
            self.points = [ConnectionPoint(number + 1, "", Bounds()) for number in range(len(self.points))]
            self.slices |= {point.name: point for point in self.points}
        self.registry = self.slices[REGISTRY] = SimulatedRegistry()
        first = None if is_empty else self.configuration
        self.store = SimulatedStore(State.first(first))
        self.is_buffered = buffered
        self.made_points = len(self.points)
        self.coordinators = 0
        self.coordinator: Coordinator | None = None
        self.asleep: set[str] = set()
        self.declared: set[str] = set()
        self.notices: deque[str] = deque()
        self.acknowledged_at: dict[tuple[str, int], int] = {}
        self.numbers: dict[tuple[str, int], int] = {}
        self.ended_at: dict[int, int] = {}
        self.transactions = 0
        self.new_coordinator()

    # Slices and coordinators.

    def make(self, name: str, configuration: Configuration | None) -> Slice:
        if name.startswith("access-point"):
            return AccessPoint(name, configuration, REGISTRY)
        if name.startswith("matcher"):
            return Matcher(name, configuration, REGISTRY)
        return ExitPoint(name, configuration)

    def new_slice(self, layer: str) -> str:
        self.made[layer] += 1
        name = f"{layer}-{self.made[layer]}"
        self.slices[name] = self.make(name, None)
        return name

    def new_coordinator(self) -> None:
        self.coordinators += 1
        self.coordinator = Coordinator(f"coordinator-{self.coordinators}", self.store, REGISTRY)
        self.slices[self.coordinator.name] = self.coordinator
        self.send(self.coordinator.name, self.coordinator.take_over())
        state = self.store.state
        known = frozenset[str]().union(state.connection_points, *(each.slices for each in state.live))
        self.notices = deque(sorted(self.declared & known - state.dead))
        self.look_after_the_living_and_the_dead()

    @property
    def leader(self) -> Coordinator | None:
        """Returns the coordinator, if it exists and is not suspended."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.name not in self.slices or coordinator.name in self.asleep:
            return None
        return coordinator

    def strangers(self) -> list[str]:
        """Returns the Connection Points that the leader does not know yet."""
        leader = self.leader
        return [
            point.name
            for point in self.points
            if leader is not None and point.name not in leader.state.connection_points
        ]

    def look_after_the_living_and_the_dead(self) -> None:
        if (leader := self.leader) is not None:
            for name in self.strangers():
                self.send(leader.name, leader.on_joined(name))
            if self.notices:
                self.send(leader.name, leader.on_death([self.notices.popleft()]))
            if lost(leader.state) and not leader.is_deposed:
                wanted = self.another(leader.state.current, leader.state.dead, is_recovery=True)
                self.send(leader.name, leader.recover(wanted))

    def reconfigure(self) -> None:
        if (leader := self.leader) is None or leader.is_deposed:
            return
        if leader.state.transaction is None and not lost(leader.state):
            self.transactions += 1
            wanted = self.another(leader.state.current, leader.state.dead, is_recovery=False)
            self.send(leader.name, leader.change(wanted, is_buffered=self.is_buffered))
        elif is_abortable(leader.state) and self.rng.random() < 0.05:
            self.send(leader.name, leader.abort())

    def another(self, current: Configuration, dead: frozenset[str], *, is_recovery: bool) -> Configuration:
        """Returns a configuration in which layers grow, shrink, or have some or all slices replaced. It contains no
        dead slice."""
        rng, chosen = self.rng, []
        for layer, most in LAYERS.items():
            before = getattr(current, layer.replace("-", "_") + "s")
            names = [name for name in before if name not in dead]
            wanted = rng.randint(1, most) if rng.random() < (0.25 if is_recovery else 0.6) else max(1, len(before))
            if rng.random() < (0.1 if is_recovery else 0.2):
                names = []
            elif names and rng.random() < 0.3:
                names.remove(rng.choice(names))
            while len(names) > wanted:
                names.remove(rng.choice(names))
            while len(names) < wanted:
                names.append(self.new_slice(layer))
            chosen.append(tuple(names))
        access_points, matchers, exit_points = chosen
        return Configuration(0, access_points, matchers, exit_points)

    # Faults.

    def crash(self) -> None:
        rng = self.rng
        if rng.random() < 0.2:
            if (leader := self.leader) is not None:
                self.crashes_left -= 1
                if rng.random() < 0.5:
                    self.stop(leader.name, cuts=True)
                else:
                    self.asleep.add(leader.name)
            return
        if self.brokers and rng.random() < 0.25 and len(self.points) > 1:
            self.crashes_left -= 1
            self.crash_point(rng.choice(self.points))
            return
        live = {name for configuration in self.store.state.live for name in configuration.slices}
        at_risk = sorted(name for name in live if name in self.slices and name not in self.declared | self.asleep)
        if not at_risk:
            return
        self.crashes_left -= 1
        name = rng.choice(at_risk)
        if rng.random() < 0.6:
            self.stop(name, cuts=True)
            self.declare_dead(name)
        else:
            self.asleep.add(name)
            if rng.random() < 0.85:  # otherwise it is only slow
                self.declare_dead(name)

    def crash_point(self, point: ConnectionPoint) -> None:
        """Kills a broker, or suspends it until it is declared dead. Its publishers reconnect to another, and resend."""
        self.points.remove(point)
        if self.rng.random() < 0.6:
            self.stop(point.name, cuts=True)
        else:
            self.asleep.add(point.name)
        self.declare_dead(point.name)
        for subscriber in self.subscribers:
            subscriber.was_disconnected |= subscriber.point is point
        for publisher in self.publishers:
            if publisher.point is point:
                publisher.point = self.rng.choice(self.points)
                self.reconnect(publisher)

    def join_point(self) -> None:
        """Adds a broker."""
        self.made_points += 1
        point = ConnectionPoint(self.made_points, "", Bounds())
        self.points.append(point)
        self.slices[point.name] = point
        self.look_after_the_living_and_the_dead()

    def declare_dead(self, name: str) -> None:
        self.declared.add(name)
        self.notices.append(name)

    def stop(self, name: str, *, cuts: bool) -> None:
        """Stops a slice. Frames to it are lost. If it was disconnected, part of what it has sent may still arrive."""
        self.slices.pop(name, None)
        for (source, address), frames in self.channels.items():
            if address == name:
                frames.clear()
            elif source == name and cuts:
                for _ in range(self.rng.randint(0, len(frames))):
                    frames.pop()

    def wake_one(self) -> None:
        if self.asleep:
            self.asleep.discard(self.rng.choice(sorted(self.asleep)))

    # The network.

    def send(self, source: str, outputs: Sequence[Output]) -> None:
        address: Any
        frame: Any
        for address, frame in outputs:
            if isinstance(address, int):
                self.tell(source, address, frame)
            elif isinstance(frame, Retire):
                self.stop(address, cuts=False)
            elif address in self.slices:
                if (source, address) not in self.lazy:
                    self.lazy[source, address] = self.rng.choice(self.laziness)
                self.channels.setdefault((source, address), deque()).append(frame)

    def carry_one(self) -> None:
        waiting = [channel for channel, frames in self.channels.items() if frames and channel[1] not in self.asleep]
        if not waiting:
            return
        for _ in range(30):
            source, address = channel = self.rng.choice(waiting)
            if self.rng.random() >= self.lazy[channel]:
                break
        frame = self.channels[channel].popleft()
        if isinstance(frame, Deliver):
            self.check_no_ghosts(frame)
        part: Any = self.slices[address]
        if isinstance(part, Coordinator):
            self.send(address, getattr(part, frame.handler)(source, frame, self.now_s))
        else:
            self.send(address, part.handle(source, frame, self.now_s))

    def tell(self, point: str, session: int, event: SessionEvent) -> None:
        if point in self.declared:
            return  # its clients have gone
        super().tell(point, session, event)
        if isinstance(event, PublishAcknowledged):
            publisher = next(each for each in self.publishers if each.name == event.publisher)
            for sequence in range(1, event.sequence + 1):
                self.acknowledged_at.setdefault((publisher.name, sequence), self.step)
        elif isinstance(event, SubscriptionEnded):
            self.ended_at[self.numbers[point, event.client_id]] = self.step

    def subscribe(self) -> None:
        super().subscribe()
        for point in self.points:
            for number, subscription in point._subscriptions.items():
                self.numbers.setdefault((point.name, subscription.client_id), number)

    # A run.

    def run(self, steps: int = 400) -> None:
        with patch.object(matchers, "MOVED_AT_ONCE", MOVED_AT_ONCE):
            self._run(steps)

    def _run(self, steps: int) -> None:
        rng = self.rng
        for number in range(rng.randint(1, 4)):
            self.add_publisher(f"publisher-{number}")
        clients = [self.publish] * 4 + [self.subscribe] * 2 + [self.unsubscribe, self.send_again, self.read]
        clients += [self.rebind] * self.rebinds
        client_share = rng.choice([0.05, 0.15, 0.3])
        change_share = rng.choice([0.003, 0.01, 0.03])
        crash_share = rng.choice([0.003, 0.01, 0.02])
        for _ in range(steps):
            self.step += 1
            drawn = rng.random()
            if drawn < client_share:
                rng.choice(clients)()
            elif drawn < client_share + change_share:
                self.join_point() if self.brokers and rng.random() < 0.1 else self.reconfigure()
            elif drawn < client_share + change_share + crash_share and self.crashes_left > 0:
                self.crash()
            elif drawn > 0.99:
                self.wake_one() if rng.random() < 0.3 else self.see_to_coordinators()
            else:
                self.carry_one()
        self.come_to_rest()
        self.check_laws()

    def see_to_coordinators(self) -> None:
        if self.leader is None:
            self.new_coordinator()
        else:
            self.look_after_the_living_and_the_dead()

    def come_to_rest(self) -> None:
        for _ in range(REST_STEPS):
            self.step += 1
            if self.asleep and self.rng.random() < 0.05:
                self.wake_one()
            if self.rng.random() < 0.02:
                self.see_to_coordinators()
            self.carry_one()
            takes = [self.take(subscriber) for subscriber in self.subscribers]
            if any(self.channels.values()) or any(takes):
                continue
            if self.asleep:
                self.wake_one()
            elif self.leader is None or self.notices or self.strangers():
                self.see_to_coordinators()
            elif not self.store.state.current.slices:
                self.reconfigure()
            else:
                return
        raise AssertionError("it does not come to rest")

    # The laws.

    def check_no_ghosts(self, frame: Deliver) -> None:
        """Checks that no notification goes to a subscription whose end was acknowledged before the publish."""
        for index in range(len(frame.batch)):
            sent_at = self.sent_at(frame.batch.publisher, frame.batch.first + index)
            for number in frame.ids[frame.offsets[index] : frame.offsets[index + 1]].tolist():
                ended_at = self.ended_at.get(number)
                assert ended_at is None or ended_at >= sent_at, f"{number} has ended, and is matched"

    def check_laws(self) -> None:
        state = self.store.state
        assert state.transaction is None, f"epoch {state.transaction.epoch} stands still in {state.phase}"
        super().check_laws()

    def check_rest(self) -> None:
        """Checks the laws at rest, and that every slice holds what the last configuration assigns to it."""
        current = self.store.state.current
        self.access_points = [self.slices[name] for name in current.access_points]
        self.matchers = [self.slices[name] for name in current.matchers]
        self.exit_points = [self.slices[name] for name in current.exit_points]
        super().check_rest()
        held = sum(access_point.statistics().held for access_point in self.access_points)
        assert held == 0, "an Access Point still holds something back"
        live = {number for point in self.points for number in point._subscriptions}
        assert set(self.registry.kept) == live
        for matcher in self.matchers:
            mine = {number for number in live if current.owner(number) == matcher.name}
            assert set(matcher.subscriptions()) == mine, f"{matcher.name} holds what it should not, or lacks something"
        for point in self.points:
            assert len(point._uplink) == 0
