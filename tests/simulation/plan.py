"""What a seed decides before a world begins: who is at work, and what goes wrong how often.

Worlds differ in kind, because rates that suit all of them find little: in some everybody stalls for hours, in
some the network loses replies, in some nothing fails and many fight for a shard.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tests.simulation.store import Faults

#: Each kind of world: how often what goes wrong, as a multiple of the usual.
_MOODS: dict[str, dict[str, float]] = {
    "usual": {},
    "calm": dict.fromkeys(Faults.kinds(), 0.0),
    "contention": {"stands_still": 0.3, "dies": 0.3, "breaks_before": 0, "breaks_after": 0},
    "stalls": {"stands_still": 6, "dies": 0.2, "fails_before": 0.2, "fails_after": 0.2},
    "deaths": {"dies": 8, "stands_still": 0.5},
    "network": {"fails_after": 8, "fails_before": 4, "is_late": 10, "is_cut": 4, "is_throttled": 4},
    "clocks": {"sets_clocks": 40, "stands_still": 3},
}


#: How often an actor is there, besides writers, readers and collectors.
_OFTEN = {
    "compactor": 0.5,
    "follower": 0.35,
    "publisher": 0.25,
    "appender": 0.25,
    "drainer": 0.25,
    "table writer": 0.15,
    "clone": 0.1,
    "fork": 0.05,
}

#: One world in so many has owners with records, and those who ask them.
WITH_OWNERS = 8
#: One world in so many is kept in shape by upkeep, and has checkpoints.
WITH_UPKEEP = 8
#: Nothing goes wrong but deaths: in such a world nobody may stop a writer that lives.
_ORDERLY = {**dict.fromkeys(Faults.kinds(), 0.0), "dies": 6.0}


@dataclass(frozen=True)
class Actor:
    """One of those at work: what it does, how much of it, and how long it pauses."""

    kind: str
    size: int
    #: The longest pause between two things that it does, in seconds.
    pause: float

    def __str__(self) -> str:
        return f"{self.kind}×{self.size}"


@dataclass(frozen=True)
class Plan:
    """One world. A smaller one of the same seed is what :func:`tests.simulation.shrink` looks for."""

    seed: int
    mood: str
    actors: tuple[Actor, ...]
    faults: tuple[tuple[str, float], ...]
    is_near: bool
    #: The world's own seed: the order of all steps.
    schedule: int = 0
    #: How often a writer flushes after a write.
    flushes: float = 0.3
    is_light: bool = True
    has_key: bool = True
    #: Seconds of an owner's lease; 0 where nobody has records.
    lease: float = 0.0
    is_orderly: bool = False
    #: Whether some keep it in shape, and some make checkpoints.
    is_kept: bool = False
    #: Whether MemTables are full after one put, and are sealed while others are under way.
    is_small: bool = False
    #: Actors by number that were left out, and faults that were turned off, to find a smaller world.
    left_out: frozenset[int] = field(default_factory=frozenset)
    turned_off: frozenset[str] = field(default_factory=frozenset)

    @property
    def present(self) -> list[tuple[int, Actor]]:
        return [(number, each) for number, each in enumerate(self.actors) if number not in self.left_out]

    def rates(self) -> Faults:
        usual = Faults()
        return Faults(
            **{
                name: 0.0 if name in self.turned_off else min(getattr(usual, name) * times, 0.3)
                for name, times in self.faults
            }
        )

    def smaller(self) -> list[Plan]:
        """Worlds with one thing less."""
        less = [replace(self, left_out=self.left_out | {number}) for number, _ in self.present]
        rates = self.rates()
        less += [
            replace(self, turned_off=self.turned_off | {name})
            for name in Faults.kinds()
            if getattr(rates, name) > 0
        ]
        for number, actor in self.present:
            if actor.size > 1:
                actors = list(self.actors)
                actors[number] = replace(actor, size=actor.size - 1)
                less.append(replace(self, actors=tuple(actors)))
        return less

    def command(self) -> str:
        """What runs this very world again, and prints its steps."""
        words = [f"python -m tests.simulation {self.seed}"]
        if self.schedule != self.seed:
            words.append(f"--schedule {self.schedule}")
        if self.left_out:
            words.append("--without " + ",".join(map(str, sorted(self.left_out))))
        if self.turned_off:
            words.append("--off " + ",".join(sorted(self.turned_off)))
        original = plan_of(self.seed)
        sizes = [
            f"{number}={actor.size}"
            for number, actor in self.present
            if actor.size != original.actors[number].size
        ]
        if sizes:
            words.append("--sizes " + ",".join(sizes))
        return " ".join(words)

    def __str__(self) -> str:
        who = ", ".join(f"{number}: {actor}" for number, actor in self.present)
        rates = self.rates()
        what = ", ".join(f"{n}={getattr(rates, n):g}" for n in Faults.kinds() if getattr(rates, n) > 0)
        kind = "light" if self.is_light else "with Lance"
        return f"a {self.mood} world, {kind}: {who}; faults: {what or 'none'}"


#: One world in so many has Lance itself in it, which takes ten times as long.
WITH_LANCE = 20


def _plan_with_owners(seed: int) -> Plan:
    """Owners by their records. Pauses are some leases: every one has three heartbeats, which are steps."""
    chance = random.Random(f"owners of {seed}")
    is_orderly = chance.random() < 0.4
    mood = "orderly" if is_orderly else chance.choice([*_MOODS, "stalls", "network"])
    collects = chance.random() < 0.25
    # Collectors wait for what is ten minutes old.
    lease = 600.0 if collects else chance.choice([2.0, 10.0, 60.0])
    pause = chance.choice([0.0, 0.1, 0.5, 2.0]) * lease

    def some(kind: str, least: int, most: int, size: int = 3) -> list[Actor]:
        pauses = chance.choice([pause, chance.choice([0.0, 0.2, 1.0]) * lease])
        return [Actor(kind, chance.randint(1, size), pauses) for _ in range(chance.randint(least, most))]

    actors = [*some("owner", 1, 3), *some("service", 0, 1), *some("asker", 0, 1), *some("publisher", 0, 1)]
    actors += [*some("reader", 1, 1), *some("follower", 0, 1), *some("compactor", 0, 1)]
    if not is_orderly and chance.random() < 0.6:
        actors += some("vandal", 1, 1)
    if collects:
        actors.append(Actor("collector", chance.randint(2, 4), 900.0))
    rates = _ORDERLY if is_orderly else _MOODS[mood]
    return Plan(
        seed,
        mood,
        tuple(actors),
        tuple((name, rates.get(name, 1.0)) for name in Faults.kinds()),
        is_near=chance.random() < 0.5,
        schedule=seed,
        lease=lease,
        is_orderly=is_orderly,
        is_small=seed % 5 == 1,
    )


def _plan_with_upkeep(seed: int) -> Plan:
    """Several who keep the table in shape and several who make checkpoints, beside all kinds of writers."""
    chance = random.Random(f"upkeep of {seed}")
    mood = chance.choice([*_MOODS, "deaths", "contention"])
    pause = chance.choice([0.5, 60.0, 900.0])

    def some(kind: str, least: int, most: int, size: int) -> list[Actor]:
        return [Actor(kind, chance.randint(1, size), pause) for _ in range(chance.randint(least, most))]

    actors = [*some("writer", 1, 2, 4), *some("owner", 0, 1, 3), *some("upkeeper", 1, 3, 3)]
    actors += [*some("checkpointer", 0, 2, 2), *some("reader", 1, 1, 3), *some("follower", 0, 1, 2)]
    actors += [*some("compactor", 0, 1, 2), *some("dropper", 0, 1, 2)]
    rates = _MOODS[mood]
    return Plan(
        seed,
        mood,
        tuple(actors),
        tuple((name, rates.get(name, 1.0)) for name in Faults.kinds()),
        is_near=chance.random() < 0.7,
        schedule=seed,
        flushes=0.6,
        lease=600.0,
        is_kept=True,
        is_small=chance.random() < 0.2,
    )


def plan_of(seed: int) -> Plan:
    """The world of ``seed``."""
    if seed % WITH_OWNERS == 3:
        return _plan_with_owners(seed)
    if seed % WITH_UPKEEP == 6:
        return _plan_with_upkeep(seed)
    chance = random.Random(f"plan of {seed}")
    mood = chance.choice([*_MOODS, "contention", "stalls"])
    is_light = seed % WITH_LANCE != 0
    has_key = is_light or chance.random() < 0.6
    # A few kinds of actors in each: swarms find more than crowds.
    pause = chance.choice([0.0, 0.5, 60.0, 900.0])

    def some(kind: str, most: int, size: int = 4) -> list[Actor]:
        pauses = chance.choice([pause, chance.choice([0.0, 0.5, 60.0, 900.0])])
        return [Actor(kind, chance.randint(1, size), pauses) for _ in range(chance.randint(0, most))]

    def one(kind: str, size: int) -> Actor:
        return Actor(kind, chance.randint(1, size), pause)

    theme = chance.choice(["any", "any", "compaction", "jobs"]) if is_light else "any"
    if theme == "compaction":
        pause = chance.choice([0.0, 0.0, 0.5, 60.0])
        actors = [one("writer", 5), one("writer", 3), one("reader", 4), one("reader", 4)]
        actors += [one("compactor", 4) for _ in range(chance.randint(1, 3))]
    elif theme == "jobs":
        actors = [one("reader", 2), one("follower", 4)]
        actors += [one(chance.choice(["publisher", "appender"]), 3) for _ in range(chance.randint(1, 2))]
        actors += [
            one(chance.choice(["writer", "drainer", "compactor"]), 3) for _ in range(chance.randint(0, 2))
        ]
    else:
        actors = [one("writer", 5), *some("writer", 2), one("reader", 4)]
        for kind, often in _OFTEN.items():
            if (is_light or kind in ("compactor", "table writer")) and chance.random() < often:
                actors += [one(kind, 3) for _ in range(chance.choice([1, 2] if kind == "compactor" else [1]))]
    if chance.random() < (0.75 if mood in ("stalls", "clocks", "usual") else 0.3):
        longer = max(pause, chance.choice([400.0, 900.0]))
        actors += [Actor("collector", chance.randint(3, 6), longer) for _ in range(chance.choice([1, 1, 2]))]
    rates = _MOODS[mood]
    return Plan(
        seed,
        mood,
        tuple(actors),
        tuple((name, rates.get(name, 1.0)) for name in Faults.kinds()),
        is_near=is_light and chance.random() < 0.7,
        schedule=seed,
        flushes=0.7 if theme == "compaction" else 0.3,
        is_light=is_light,
        has_key=has_key,
        is_small=seed % 7 == 5,
    )
