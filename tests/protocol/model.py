"""The protocol of one shard as a model small enough to try every order of its steps.

Writers claim a shard, put rows, flush and are superseded; compactors move SSTables into the base table;
a collector deletes WAL entries; a reader takes a snapshot. Each step is one call on storage, and between
any two steps every other actor may take its own. An actor that takes no further step is one that was killed
or stands still, so kills and stalls at every point are among the orders that are tried.

The model says what the code in ``shard``, ``writer.flush``, ``maintenance`` and ``reader.state`` says,
without bytes, threads and errors. What it leaves out: batches of several rows, manifest versions that were
collected, copies of a machine, lost replies, and collected SSTables (a read has the time that their age
gives it).

Each rule that protects rows has a name in :class:`Rule`. A model without one of them must lose a row,
double one or show one that vanishes: ``test_protocol.py`` looks for the shortest way to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

Row = int


class Rule(StrEnum):
    """What the protocol rests on; each can be left out of a model."""

    CREATE_MANIFEST_ONCE = "a manifest version is created only where there is none"
    CREATE_ENTRY_ONCE = "a WAL entry is created only where there is none"
    SENTINEL = "a claim puts a sentinel behind the log before it replays it"
    END_BEFORE_CLAIM = "the end of the log is looked for before the claim, not after it"
    CONFLICT_CHECKS_EPOCH = "whoever finds its position taken looks whether it was superseded"
    SEARCH_THEN_CHECK = "whoever has searched for the end of the log looks at the epoch after the search"
    RECHECK_AFTER_WRITE = "an entry counts only if its slot cannot have been emptied before it"
    AGE_OF_GARBAGE = "nothing is collected within the time in which a writer trusts what it knows"
    COLLECT_BELOW_CURSOR = "only entries that SSTables cover are collected"
    KEEP_LAST_ENTRY = "the last entry of a log is never collected"
    FLUSH_CHECKS_EPOCH = "a manifest is committed only under the epoch of its writer"
    FLUSH_COVERS_ITS_ROWS = "the replay cursor goes no further than the rows that were flushed"
    SSTABLE_BEFORE_MANIFEST = "an SSTable is complete before a manifest names it"
    REPLAY_SKIPS_FLUSHED = "a replay begins behind the rows that SSTables hold"
    ROWS_WITH_MARKER = "rows and marker reach the base table in one commit"
    MARKER_IS_COMPARED = "a compaction commits only where the marker is still the one it read"
    PRUNE_BELOW_MARKER = "a manifest loses only the SSTables that the base table holds"
    BASE_LAST = "a reader reads the base table after the shards"
    MARKER_BELOW_GENERATION = "a reader starts again when the base holds what it did not see flushed"
    MANIFEST_TWICE = "a reader believes the end of a log when no flush came in between"
    VANISHED_ENTRY = "a reader starts again when an entry of its log has vanished"
    HIDE_COMPACTED = "a reader leaves out SSTables that its base table holds"


class Entry(NamedTuple):
    """A WAL entry; a sentinel has no row."""

    epoch: int
    row: Row | None


class Manifest(NamedTuple):
    version: int = 0
    epoch: int = 0
    generation: int = 1
    #: The last position whose rows are in SSTables.
    cursor: int = 0
    sstables: tuple[tuple[int, frozenset[Row]], ...] = ()


class Base(NamedTuple):
    """Rows with the number of times that each is there, and the newest generation among them."""

    version: int = 0
    rows: tuple[Row, ...] = ()
    marker: int = 0


class Writer(NamedTuple):
    step: str = "look"
    #: Rows to put, the next one first.
    to_put: tuple[Row, ...] = ()
    flushes: int = 0
    epoch: int = 0
    known: Manifest | None = None
    #: A writer of Lance: it looks for the end of a log after its claim, and by the entries alone.
    is_lance: bool = False
    next: int = 0
    #: Whether the slot at ``next`` cannot have been emptied since it was known to be free.
    is_confirmed: bool = False
    #: Rows in memory, and the position up to which the log has been read or written.
    rows: frozenset[Row] = frozenset()
    covered: int = 0
    #: A thread of its own flushes: where it is, and the rows with the position that they cover.
    flush_step: str = "idle"
    flushed_from: Manifest | None = None
    frozen: frozenset[Row] = frozenset()
    frozen_covered: int = 0


class Compactor(NamedTuple):
    step: str = "read"
    rounds: int = 1
    known: Manifest | None = None
    base: Base | None = None


class Collector(NamedTuple):
    step: str = "read"
    rounds: int = 1
    doomed: tuple[int, ...] = ()


class Reader(NamedTuple):
    step: str = "manifest"
    reads: int = 1
    must_see: frozenset[Row] = frozenset()
    known: Manifest | None = None
    base: Base | None = None
    end: int = 0


class State(NamedTuple):
    """The shard on storage, the base table, and where each actor is."""

    log: tuple[Entry | None, ...] = ()
    manifest: Manifest = Manifest()
    base: Base = Base()
    unfinished: frozenset[int] = frozenset()
    writers: tuple[Writer, ...] = ()
    compactors: tuple[Compactor, ...] = ()
    collector: Collector = Collector()
    reader: Reader = Reader()
    acknowledged: frozenset[Row] = frozenset()
    #: What a finished read has shown: later ones must show it too.
    shown: frozenset[Row] = frozenset()
    #: What is wrong with the step that led here.
    broken: str | None = None

    def entry(self, position: int) -> Entry | None:
        return self.log[position - 1] if position <= len(self.log) else None

    def tip(self, *, of_entries_alone: bool = False) -> int:
        """The position behind the last entry, by listing, and not below the cursor."""
        end = max((place for place, entry in enumerate(self.log, 1) if entry is not None), default=0)
        return (end if of_entries_alone else max(end, self.manifest.cursor)) + 1

    def first_missing(self, position: int) -> int:
        """The first position from ``position`` on without an entry: where a reader takes the end to be."""
        while self.entry(position) is not None:
            position += 1
        return position

    def with_entry(self, position: int, entry: Entry | None) -> State:
        log = [*self.log, *[None] * (position - len(self.log))]
        log[position - 1] = entry
        return self._replace(log=tuple(log))


Step = tuple[str, State]
#: A state with some fields of the actor at hand changed.
Then = Callable[..., State]


class Protocol:
    """The steps that are possible in a state, with some rules left out."""

    def __init__(self, *without: Rule) -> None:
        self._without = frozenset(without)

    def has(self, rule: Rule) -> bool:
        return rule not in self._without

    def steps(self, state: State) -> Iterator[Step]:
        """Every step that some actor can take, named, with the state after it."""
        for number, writer in enumerate(state.writers):
            for name, after in self._writer(state, number, writer):
                yield f"writer {number + 1}: {name}", after
        for number, compactor in enumerate(state.compactors):
            for name, after in self._compactor(state, number, compactor):
                yield f"compactor {number + 1}: {name}", after
        for name, after in self._collector(state, state.collector):
            yield f"collector: {name}", after
        for name, after in self._reader(state, state.reader):
            yield f"reader: {name}", after

    # -------------------------------------------------------------- writers

    def _writer(self, state: State, number: int, writer: Writer) -> Iterator[Step]:
        def then(after: State = state, **changes: object) -> State:
            writers = list(after.writers)
            writers[number] = writers[number]._replace(**changes)  # type: ignore[arg-type]
            return after._replace(writers=tuple(writers))

        match writer.step:
            case "look":
                yield f"the log ends at {state.tip()}", then(step="read", next=state.tip(), is_confirmed=True)
            case "read":
                yield "reads the manifest", then(step="claim", known=state.manifest)
            case "claim":
                yield from self._claim(state, writer, then)
            case "look again":
                yield f"the log ends at {state.tip()}", then(step="sentinel", next=state.tip())
            case "sentinel":
                yield from self._append(state, writer, Entry(writer.epoch, None), then)
            case "replay":
                yield self._replay(state, writer, then)
            case "ready" if writer.to_put:
                yield from self._append(state, writer, Entry(writer.epoch, writer.to_put[0]), then)
            case "sentinel: conflict" | "ready: conflict":
                yield from self._after_conflict(state, writer, then)
            case "sentinel: recheck" | "ready: recheck":
                yield self._recheck(state, writer, then)
            case "sentinel: search" | "ready: search":
                tip, step = state.tip(of_entries_alone=writer.is_lance), f"{_task(writer)}: searched"
                yield f"the log ends at {tip}", then(step=step, next=tip, is_confirmed=True)
            case "sentinel: searched" | "ready: searched":
                yield self._check_after_search(state, writer, then)
        yield from self._flush(state, writer, then)

    def _claim(self, state: State, writer: Writer, then: Then) -> Iterator[Step]:
        known = writer.known
        assert known is not None
        claimed = known._replace(version=known.version + 1, epoch=known.epoch + 1)
        if state.manifest.version != known.version and self.has(Rule.CREATE_MANIFEST_ONCE):
            yield "loses the claim to another", then(step="read")
            return
        if writer.is_lance:
            step = "sentinel: search"
        elif not self.has(Rule.END_BEFORE_CLAIM):
            step = "look again"
        elif claimed.epoch > 1 and self.has(Rule.SENTINEL):
            step = "sentinel"
        else:
            step = "replay"
        at = max(writer.next, claimed.cursor + 1)
        after = state._replace(manifest=claimed)
        yield (
            f"claims epoch {claimed.epoch}",
            then(after, step=step, epoch=claimed.epoch, known=claimed, next=at),
        )

    def _append(self, state: State, writer: Writer, entry: Entry, then: Then) -> Iterator[Step]:
        at, what = writer.next, "the sentinel" if entry.row is None else f"row {entry.row}"
        if state.entry(at) is not None and self.has(Rule.CREATE_ENTRY_ONCE):
            yield f"finds position {at} taken", then(step=f"{writer.step}: conflict")
            return
        after = state.with_entry(at, entry)
        if writer.is_confirmed or not self.has(Rule.RECHECK_AFTER_WRITE):
            yield self._counts(f"puts {what} at {at}", after, writer, then)
        else:
            yield f"puts {what} at {at} and looks again", then(after, step=f"{writer.step}: recheck")

    def _counts(self, name: str, state: State, writer: Writer, then: Then) -> Step:
        """The entry at ``next`` is settled: a sentinel is followed by the replay, a row is acknowledged."""
        if _task(writer) == "sentinel":
            return name, then(state, step="replay", next=writer.next + 1, is_confirmed=True)
        row, *rest = writer.to_put
        acknowledged = state._replace(acknowledged=state.acknowledged | {row})
        return f"{name}: acknowledged", then(
            acknowledged,
            step="ready",
            to_put=tuple(rest),
            rows=writer.rows | {row},
            covered=writer.next,
            next=writer.next + 1,
            is_confirmed=True,
        )

    def _after_conflict(self, state: State, writer: Writer, then: Then) -> Iterator[Step]:
        if state.manifest.epoch != writer.epoch and self.has(Rule.CONFLICT_CHECKS_EPOCH):
            yield "was superseded", then(step="fenced")
            return
        yield "tries the next position", then(step=_task(writer), next=writer.next + 1)
        yield "has tried so many that it searches", then(step=f"{_task(writer)}: search")

    def _recheck(self, state: State, writer: Writer, then: Then) -> Step:
        if state.manifest.epoch != writer.epoch:
            return "was superseded", then(step="fenced")
        return self._counts("its entry counts", state, writer, then)

    def _check_after_search(self, state: State, writer: Writer, then: Then) -> Step:
        if state.manifest.epoch != writer.epoch and self.has(Rule.SEARCH_THEN_CHECK):
            return "was superseded", then(step="fenced")
        return "goes on", then(step=_task(writer))

    def _replay(self, state: State, writer: Writer, then: Then) -> Step:
        """Everything behind the cursor of the claimed manifest, up to the own position."""
        assert writer.known is not None
        first = writer.known.cursor + 1 if self.has(Rule.REPLAY_SKIPS_FLUSHED) else 1
        last = writer.next - 1
        entries = [state.entry(position) for position in range(first, last + 1)]
        if None in entries[writer.known.cursor + 1 - first :]:
            return "an entry vanished: a successor has flushed it", then(step="fenced")
        rows = frozenset(entry.row for entry in entries if entry is not None and entry.row is not None)
        return f"replays {sorted(rows)}", then(step="ready", rows=rows, covered=last)

    def _flush(self, state: State, writer: Writer, then: Then) -> Iterator[Step]:
        """The flushing thread, which works beside puts."""
        match writer.flush_step:
            case "idle" if writer.step.startswith("ready") and writer.flushes and writer.rows:
                frozen = {"frozen": writer.rows, "frozen_covered": writer.covered, "flush_step": "publish"}
                yield f"flushes {sorted(writer.rows)}", then(flushes=writer.flushes - 1, **frozen)
            case "publish":
                yield "reads the manifest", then(flush_step="commit", flushed_from=state.manifest)
            case "commit":
                yield from self._publish(state, writer, then)
            case "complete":
                done = state._replace(unfinished=frozenset())
                yield "completes the SSTable", then(done, flush_step="idle")

    def _publish(self, state: State, writer: Writer, then: Then) -> Iterator[Step]:
        known = writer.flushed_from
        assert known is not None
        if known.epoch != writer.epoch and self.has(Rule.FLUSH_CHECKS_EPOCH):
            yield "was superseded", then(step="fenced", flush_step="fenced")
            return
        if state.manifest.version != known.version and self.has(Rule.CREATE_MANIFEST_ONCE):
            yield "loses the commit to another", then(flush_step="publish")
            return
        is_complete = self.has(Rule.SSTABLE_BEFORE_MANIFEST)
        published = known._replace(
            version=known.version + 1,
            generation=known.generation + 1,
            cursor=writer.frozen_covered if self.has(Rule.FLUSH_COVERS_ITS_ROWS) else writer.covered,
            sstables=(*known.sstables, (known.generation, writer.frozen)),
        )
        unfinished = frozenset() if is_complete else frozenset({known.generation})
        after = state._replace(manifest=published, unfinished=unfinished)
        yield (
            f"publishes generation {known.generation}",
            then(
                after,
                flush_step="idle" if is_complete else "complete",
                rows=writer.rows - writer.frozen,
                frozen=frozenset(),
                frozen_covered=0,
                flushed_from=None,
            ),
        )

    # ------------------------------------------------------------- compactors

    def _compactor(self, state: State, number: int, compactor: Compactor) -> Iterator[Step]:
        def then(after: State = state, **changes: object) -> State:
            compactors = list(after.compactors)
            compactors[number] = compactors[number]._replace(**changes)  # type: ignore[arg-type]
            return after._replace(compactors=tuple(compactors))

        match compactor.step:
            case "read":
                if compactor.rounds:
                    yield "reads the manifest", then(step="read base", known=state.manifest)
            case "read base":
                yield "reads the base", then(step="commit", base=state.base)
            case "commit":
                yield from self._compact(state, compactor, then)
            case "mark":
                known = compactor.known
                assert known is not None
                marker = max(state.base.marker, known.sstables[-1][0])
                marked = state._replace(base=state.base._replace(marker=marker))
                yield f"marks generation {marker}", then(marked, step="read manifest")
            case "read manifest":
                yield "reads the manifest", then(step="prune", known=state.manifest)
            case "prune":
                known = compactor.known
                assert known is not None
                if state.manifest.version != known.version and self.has(Rule.CREATE_MANIFEST_ONCE):
                    yield "loses the commit to another", then(step="read manifest")
                    return
                marker = state.base.marker if self.has(Rule.PRUNE_BELOW_MARKER) else known.generation
                left = tuple(each for each in known.sstables if each[0] > marker)
                pruned = state._replace(manifest=known._replace(version=known.version + 1, sstables=left))
                yield (
                    "prunes the manifest",
                    then(pruned, step="read", known=None, base=None, rounds=compactor.rounds - 1),
                )

    def _compact(self, state: State, compactor: Compactor, then: Then) -> Iterator[Step]:
        base, known = compactor.base, compactor.known
        assert base is not None
        assert known is not None
        to_move = [(generation, rows) for generation, rows in known.sstables if generation > base.marker]
        if not to_move:
            yield "has nothing to move", then(step="read manifest")
            return
        if state.base.version != base.version and self.has(Rule.MARKER_IS_COMPARED):
            yield "loses the commit to another", then(step="read base")
            return
        marker = max(state.base.marker, to_move[-1][0])
        rows = tuple(sorted((*state.base.rows, *(row for _, each in to_move for row in each))))
        if self.has(Rule.ROWS_WITH_MARKER):
            after = state._replace(base=Base(state.base.version + 1, rows, marker))
            yield f"commits rows and marker {marker}", then(after, step="read manifest")
        else:
            after = state._replace(base=Base(state.base.version + 1, rows, state.base.marker))
            yield "commits rows", then(after, step="mark")

    # -------------------------------------------------------------- collector

    def _collector(self, state: State, collector: Collector) -> Iterator[Step]:
        def then(after: State = state, **changes: object) -> State:
            return after._replace(collector=after.collector._replace(**changes))  # type: ignore[arg-type]

        if collector.step == "read":
            if not collector.rounds:
                return
            present = [position for position, entry in enumerate(state.log, 1) if entry is not None]
            below = state.manifest.cursor if self.has(Rule.COLLECT_BELOW_CURSOR) else len(state.log)
            if self.has(Rule.KEEP_LAST_ENTRY):
                present = present[:-1]
            doomed = tuple(position for position in present if position <= below)
            if doomed:
                yield f"finds {list(doomed)} to collect", then(step="delete", doomed=doomed)
            return
        first, *rest = collector.doomed
        after = state.with_entry(first, None)
        if self.has(Rule.AGE_OF_GARBAGE):
            # So much time has passed that no writer trusts what it knew before.
            after = after._replace(
                writers=tuple(writer._replace(is_confirmed=False) for writer in after.writers)
            )
        step, rounds = ("delete", collector.rounds) if rest else ("read", collector.rounds - 1)
        yield f"deletes entry {first}", then(after, step=step, doomed=tuple(rest), rounds=rounds)

    # ----------------------------------------------------------------- reader

    def _reader(self, state: State, reader: Reader) -> Iterator[Step]:
        def then(after: State = state, **changes: object) -> State:
            return after._replace(reader=after.reader._replace(**changes))  # type: ignore[arg-type]

        again = then(step="manifest", known=None, base=None, end=0, must_see=frozenset())
        match reader.step:
            case "manifest":
                if not reader.reads:
                    return
                must_see = state.acknowledged | state.shown
                if self.has(Rule.BASE_LAST):
                    yield (
                        "reads the manifest",
                        then(step="end", known=state.manifest, must_see=must_see),
                    )
                else:
                    yield "reads the base", then(step="manifest later", base=state.base, must_see=must_see)
            case "manifest later":
                yield "reads the manifest", then(step="end", known=state.manifest)
            case "end":
                assert reader.known is not None
                end = state.first_missing(reader.known.cursor + 1)
                step = "manifest again" if self.has(Rule.MANIFEST_TWICE) else "base"
                yield f"the log ends at {end}", then(step=step, end=end)
            case "manifest again":
                assert reader.known is not None
                if state.manifest[2:4] == reader.known[2:4]:
                    yield "no flush came in between", then(step="base")
                else:
                    yield "a flush came in between", then(step="end", known=state.manifest)
            case "base":
                yield "reads the base", then(step="log", base=reader.base or state.base)
            case "log":
                yield from self._read_rows(state, reader, then, again)

    def _read_rows(self, state: State, reader: Reader, then: Then, again: State) -> Iterator[Step]:
        known, base = reader.known, reader.base
        assert known is not None
        assert base is not None
        if base.marker >= known.generation and self.has(Rule.MARKER_BELOW_GENERATION):
            yield "the base is ahead: starts again", again
            return
        entries = [state.entry(position) for position in range(known.cursor + 1, reader.end)]
        if None in entries and self.has(Rule.VANISHED_ENTRY):
            yield "an entry vanished: starts again", again
            return
        logged = [entry.row for entry in entries if entry is not None and entry.row is not None]
        hidden = base.marker if self.has(Rule.HIDE_COMPACTED) else 0
        flushed = [row for generation, rows in known.sstables if generation > hidden for row in rows]
        found = sorted((*base.rows, *flushed, *logged))
        broken = wrong_with(found, reader.must_see)
        after = state._replace(shown=state.shown | frozenset(found), broken=broken)
        yield (
            f"reads {found}",
            then(
                after,
                step="manifest",
                known=None,
                base=None,
                end=0,
                must_see=frozenset(),
                reads=reader.reads - 1,
            ),
        )


def _task(writer: Writer) -> str:
    """What the writer is at: its sentinel, or its rows."""
    return writer.step.split(":")[0]


def wrong_with(found: list[Row], must_see: frozenset[Row]) -> str | None:
    """What a read of ``found`` breaks; it has to show ``must_see`` at least."""
    if len(set(found)) < len(found):
        return f"a row is there twice: {found}"
    if missing := sorted(must_see - set(found)):
        return f"a row is lost: {missing}"
    return None


def violation(state: State) -> str | None:
    """What is wrong in a state, whatever comes next."""
    if state.broken is not None:
        return state.broken
    manifest, base = state.manifest, state.base
    if any(generation in state.unfinished for generation, _ in manifest.sstables):
        return "the manifest names an SSTable that is not complete"
    flushed = [row for generation, rows in manifest.sstables if generation > base.marker for row in rows]
    durable = sorted((*base.rows, *flushed))
    if len(set(durable)) < len(durable):
        return f"a row was flushed or compacted twice: {durable}"
    # Whoever opens the shard next finds the rest behind the cursor.
    behind = [entry.row for entry in state.log[manifest.cursor :] if entry is not None]
    logged = {row for row in behind if row is not None}
    if lost := sorted(state.acknowledged - set(durable) - logged):
        return f"an acknowledged row is lost: {lost}"
    if twice := sorted(logged & set(durable)):
        return f"a row would be replayed although it was flushed: {twice}"
    for writer in state.writers:
        if writer.step.startswith("ready") and writer.epoch == manifest.epoch:
            if unseen := sorted(state.acknowledged - writer.rows - set(durable)):
                return f"the shard's writer does not know an acknowledged row: {unseen}"
            if twice := sorted(writer.rows & set(durable)):
                return f"the shard's writer has rows in memory that were flushed: {twice}"
    return None
