"""Bugs that are planted into a copy of the code, one at a time: which test notices each of them.

Each is one text of one file in place of another. ``test_planted.py`` checks that every text is still there,
so that the list cannot rot, and plants them in ``make soak``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass(frozen=True)
class Bug:
    """``tests`` are asked where the simulator notices nothing."""

    name: str
    file: str
    old: str
    new: str
    #: What goes wrong.
    breaks: str
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        return SOURCE / "lancewal" / self.file

    def plant(self, source: Path) -> None:
        """Change the copy of the code at ``source``."""
        path = source / "lancewal" / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, (
            f"{self.name}: {self.file} has its text {text.count(self.old)} times"
        )
        path.write_text(text.replace(self.old, self.new))


_LOG = ("tests/shard/test_appender.py", "tests/shard/test_fencing.py", "tests/writer/test_fencing.py")
_MANIFEST = ("tests/shard/test_manifest.py", "tests/shard/test_fencing.py")
_WRITER = ("tests/writer/test_shard_writer.py", "tests/writer/test_replay.py", "tests/writer/test_fencing.py")
_PUBLISH = ("tests/publish",)
_COMPACT = ("tests/maintenance/test_compact.py", "tests/maintenance/test_kills.py")
_GC = ("tests/maintenance/test_gc.py", "tests/maintenance/test_bulk_gc.py", "tests/maintenance/test_needs.py")
_READ = ("tests/reader/test_snapshot.py", "tests/reader/test_tail.py")

BUGS = (
    # ---------------------------------------------------------------- the log
    Bug(
        "a claim puts no sentinel",
        "shard/log.py",
        "        if self.epoch <= 1:\n            return None\n",
        "        return None\n",
        "the predecessor writes where the successor has replayed already",
        _LOG,
    ),
    Bug(
        "a taken position is stepped over without a look at the epoch",
        "shard/log.py",
        "            if not self._put(position, data):\n                self.check_fenced()\n",
        "            if not self._put(position, data):\n",
        "a writer that was superseded gets past the sentinel",
        _LOG,
    ),
    Bug(
        "an entry in an emptied slot counts",
        "shard/log.py",
        "        self.check_fenced()\n"
        "        return position >= first_unsettled(self.manifests.read_latest())\n",
        "        return True\n",
        "a put into a slot that was collected is acknowledged",
        _LOG,
    ),
    Bug(
        "the epoch is looked at before the search for the tip",
        "shard/log.py",
        "        # After the search, not before: the search may have passed a successor's sentinel.\n"
        "        self.check_fenced()\n",
        "",
        "the search finds the tip behind a successor's sentinel",
        _LOG,
    ),
    Bug(
        "an entry of a copy is stepped over",
        "shard/log.py",
        "        self._doubled = True\n        raise self._double_error()\n\n    def _double_error",
        "        return\n\n    def _double_error",
        "two machines write under one epoch",
        _LOG,
    ),
    Bug(
        "the tip is searched below the replay cursor",
        "shard/log.py",
        "    return max(manifest.replay_after_wal_entry_position + 1, layout.FIRST_WAL_POSITION)",
        "    return layout.FIRST_WAL_POSITION",
        "an entry lands where nobody replays it",
        _LOG,
    ),
    Bug(
        "a lost reply of an append is a failure",
        "storage/store.py",
        "        if content != data:\n            return PutOutcome.EXISTS\n",
        "        return PutOutcome.EXISTS\n",
        "a retried create takes its own object for another's",
        ("tests/storage/test_store.py", *_LOG),
    ),
    Bug(
        "an entry whose outcome is unknown was not written",
        "shard/log.py",
        "                if self._may_be_there:\n                    raise OutcomeUnknownError(",
        "                if False:\n                    raise OutcomeUnknownError(",
        "rows are there although the error says they are not",
        _LOG,
    ),
    Bug(
        "an outcome that is unknown is a failure",
        "storage/store.py",
        "            kind = OutcomeUnknownError if writes else StorageError\n",
        "            kind = StorageError\n",
        "rows are there although the error says they are not",
        ("tests/storage/test_store.py", *_LOG),
    ),
    Bug(
        "a hole in the log is its end",
        "shard/log.py",
        "            if position >= unsettled:\n                raise lost_entry(",
        "            if False:\n                raise lost_entry(",
        "entries behind a lost one are overwritten or skipped",
        ("tests/shard", "tests/reader/test_snapshot.py"),
    ),
    # ----------------------------------------------------------- the manifest
    Bug(
        "a claim keeps the epoch",
        "shard/manifest.py",
        "version=current.version + 1, writer_epoch=current.writer_epoch + 1)",
        "version=current.version + 1, writer_epoch=max(current.writer_epoch, 1))",
        "nobody is fenced",
        _MANIFEST,
    ),
    Bug(
        "a manifest is committed whatever its epoch",
        "shard/manifest.py",
        "            if epoch is not None and current.writer_epoch != epoch:\n",
        "            if False:\n",
        "a writer that was superseded flushes",
        _MANIFEST,
    ),
    Bug(
        "a manifest in an emptied slot counts",
        "shard/manifest.py",
        "        if self._clock() - started > RECHECK_AFTER.total_seconds():\n"
        "            # The slot may have been emptied",
        "        if False:\n            # The slot may have been emptied",
        "a claim or a flush is lost after a stall",
        _MANIFEST,
    ),
    Bug(
        "the newest manifest is guessed after a stall",
        "shard/manifest.py",
        "        if newest is None or self._clock() - since > RECHECK_AFTER.total_seconds():\n",
        "        if newest is None:\n",
        "a version whose successors were collected is taken for the newest",
        _MANIFEST,
    ),
    Bug(
        "a hint is believed without its neighbour",
        "shard/manifest.py",
        "        if not below:\n",
        "        if False:\n",
        "a stray in an emptied slot is taken for the newest",
        (*_MANIFEST, "tests/maintenance/test_bulk_gc.py"),
    ),
    Bug(
        "a lost commit is taken for won",
        "shard/manifest.py",
        "        if self._store.put_if_absent(path, data) is PutOutcome.EXISTS:\n            return False\n",
        "        self._store.put_if_absent(path, data)\n",
        "two commit the same version",
        _MANIFEST,
    ),
    # -------------------------------------------------------------- the writer
    Bug(
        "a put is acknowledged before it is durable",
        "writer/group_commit.py",
        "        if waiter.state is PutState.QUEUED:\n"
        "            return waiter.end_position <= self.durable_position\n",
        "        if waiter.state is PutState.QUEUED:\n            return True\n",
        "rows that were acknowledged are not in the log",
        ("tests/writer/test_group_puts.py", *_WRITER),
    ),
    Bug(
        "a flush publishes at the wrong generation",
        "writer/flush.py",
        "            if manifest.current_generation != memtable.generation:\n"
        "                raise StorageError(",
        "            if False:\n                raise StorageError(",
        "a flush that was published is published again",
        _WRITER,
    ),
    Bug(
        "a flush does not look for a copy of its writer",
        "writer/flush.py",
        "        self._appender.check_alone()\n",
        "",
        "rows of a cloned machine are declared flushed",
        ("tests/writer", "tests/shard/test_appender.py"),
    ),
    Bug(
        "a flush covers one entry too many",
        "writer/flush.py",
        "                replay_after_wal_entry_position=memtable.covered_wal_position,\n",
        "                replay_after_wal_entry_position=memtable.covered_wal_position + 1,\n",
        "the entry behind a flush is never replayed",
        _WRITER,
    ),
    Bug(
        "an SSTable is published before its rows are in the log",
        "writer/flush.py",
        "        finally:\n            logged.result()\n",
        "        finally:\n            pass\n",
        "the cursor is that of an earlier entry",
        _WRITER,
    ),
    Bug(
        "a fenced flush goes on",
        "writer/flush.py",
        "        self._appender.manifests.commit_update(self._state.epoch, published)\n",
        "        self._appender.manifests.commit_update(None, published)\n",
        "a writer that was superseded moves the cursor past its successor's rows",
        _WRITER,
    ),
    Bug(
        "entries of different generations share a MemTable",
        "writer/group_commit.py",
        "                if puts and (put.memtable is not puts[0].memtable or not fits):\n",
        "                if puts and not fits:\n",
        "an entry is half flushed",
        ("tests/writer/test_group_puts.py", *_WRITER),
    ),
    Bug(
        "replay skips the last entry",
        "shard/replay.py",
        "        self.range = ReplayRange(start, max(start, end))\n",
        "        self.range = ReplayRange(start, max(start, end - 1))\n",
        "rows are lost at a take-over",
        _WRITER,
    ),
    Bug(
        "replay loads what is flushed",
        "shard/replay.py",
        "                if entry.sentinel or self._is_flushed(entry.position, entry.generation):\n",
        "                if entry.sentinel:\n",
        "older rows lie over newer ones",
        _WRITER,
    ),
    Bug(
        "replay goes on over a successor's entries",
        "shard/replay.py",
        "                if entry.writer_epoch > self._appender.epoch:\n",
        "                if False:\n",
        "a writer opens that has lost its shard already",
        (*_WRITER, "tests/shard"),
    ),
    Bug(
        "replayed rows do not move the cursor",
        "writer/modes.py",
        "        active.covered_wal_position = entry.position\n",
        "",
        "what was replayed is replayed again, over newer rows",
        _WRITER,
    ),
    Bug(
        "a forked child writes",
        "storage/forks.py",
        "    if _forked:\n",
        "    if False:\n",
        "two processes write under one epoch",
        ("tests/storage/test_forks.py",),
    ),
    # ----------------------------------------------------------------- reading
    Bug(
        "the manifest is not looked at again",
        "reader/state.py",
        "            if newest.version == place.manifest.version:\n                return place\n",
        "            return place\n",
        "what was flushed and collected meanwhile is missed",
        _READ,
    ),
    Bug(
        "a base that is ahead is taken",
        "reader/state.py",
        "        if reached >= place.manifest.current_generation:\n",
        "        if False:\n",
        "older rows of the log lie over newer ones of the base",
        _READ,
    ),
    Bug(
        "parts of a compaction are not announced",
        "maintenance/keyed.py",
        "            elif commits == 1:\n                raised |= _announced(base, markers)\n",
        "",
        "a reader sees half of a batch in the base",
        (*_READ, *_COMPACT),
    ),
    Bug(
        "the base is read before the manifests",
        "reader/state.py",
        "        is_recent = self._base_at > after\n",
        "        is_recent = True\n",
        "what is compacted and pruned in between is missed",
        _READ,
    ),
    Bug(
        "a base is kept although the manifest has changed",
        "reader/state.py",
        "        if any(place is not fresh[shard] for shard, place in zip(fresh, confirmed, strict=True)):\n",
        "        if False:\n",
        "what is compacted and pruned in between is missed",
        _READ,
    ),
    Bug(
        "SSTables that the base holds are read as well",
        "reader/state.py",
        "            if entry.generation > held:\n",
        "            if True:\n",
        "compacted rows lie over newer ones of the base",
        (*_READ, "tests/maintenance/test_compact.py"),
    ),
    # -------------------------------------------------------------- compaction
    Bug(
        "the marker comes with the first rows",
        "maintenance/keyed.py",
        "            if part.is_last:\n                raised |= markers\n",
        "            if commits == 1:\n                raised |= markers\n",
        "a compactor that dies between two commits loses rows",
        _COMPACT,
    ),
    Bug(
        "a compaction raises no fence",
        "maintenance/keyed.py",
        "            raised = {fence_id(shard_id): fence + commits for shard_id, fence in fences.items()}\n",
        "            raised = dict[UUID, int]()\n",
        "a compactor that was stopped takes keys away that were written again",
        _COMPACT,
    ),
    Bug(
        "deleted keys stay in the base",
        "maintenance/keyed.py",
        "            yield _Part(source, dead=dead if listed and is_last else (), is_last=is_last)\n",
        "            yield _Part(source, is_last=is_last)\n",
        "deleted rows come back",
        _COMPACT,
    ),
    Bug(
        "a compaction takes generations that the base holds",
        "maintenance/keyed.py",
        "            missing = [entry for entry in entries if entry.generation > held]\n",
        "            missing = list(entries)\n",
        "older rows replace newer ones",
        _COMPACT,
    ),
    Bug(
        "older rows win in a compaction",
        "maintenance/newest.py",
        "    newest_first = levels[::-1]\n",
        "    newest_first = levels\n",
        "an older version of a key stays",
        _COMPACT,
    ),
    Bug(
        "tags are not looked at before an append",
        "base/markers.py",
        "            markers[shard_id] = max(markers.get(shard_id, 0), generation)\n    return markers\n",
        "            markers.setdefault(shard_id, 0)\n    return markers\n",
        "rows without a key are appended twice",
        _COMPACT,
    ),
    # -------------------------------------------------------------- collection
    Bug(
        "entries that nothing covers are collected",
        "maintenance/garbage.py",
        "        if position > shard.manifest.replay_after_wal_entry_position:\n            break\n",
        "",
        "rows are lost",
        _GC,
    ),
    Bug(
        "entries are collected by their stamps alone",
        "maintenance/garbage.py",
        '            if reason := shard.looks.unseen("covered", position, age):\n',
        "            if reason := None:\n",
        "a clock that is wrong empties the slot of a writer that was stopped for seconds",
        _GC,
    ),
    Bug(
        "the last entry of a log is collected",
        "maintenance/garbage.py",
        "    for position in list(infos)[:-1]:\n",
        "    for position in list(infos):\n",
        "writers of Lance begin again at position 1",
        _GC,
    ),
    Bug(
        "manifests go many at a time",
        "maintenance/garbage.py",
        "_VERSIONS_AT_ONCE = 2\n",
        "_VERSIONS_AT_ONCE = 1000\n",
        "a deletion that is carried out by half leaves a chain with a gap",
        _GC,
    ),
    Bug(
        "SSTables that are listed are collected",
        "maintenance/garbage.py",
        "        listed = {entry.path for entry in self.manifest.sstables} - self.pruned.keys()\n",
        "        listed: set[str] = set()\n",
        "rows are lost",
        _GC,
    ),
    Bug(
        "generations that the base does not hold are pruned",
        "maintenance/garbage.py",
        "        if entry.generation <= shard.marker and not _entry_stays(shard, entry)\n",
        "        if entry.generation <= shard.marker + 1\n",
        "rows are lost",
        _GC,
    ),
    Bug(
        "directories of flushes that go on are collected",
        "maintenance/directories.py",
        "        if number >= self.shard.manifest.current_generation:\n            return None\n",
        "",
        "a flush that was slow lists a directory that is gone",
        _GC,
    ),
    Bug(
        "what a pointer names is collected",
        "maintenance/directories.py",
        "        if each.name in pointed:\n",
        "        if False:\n",
        "the feed lacks rows, or a publication lists what is gone",
        (*_GC, *_PUBLISH),
    ),
    # -------------------------------------------------------- jobs and the feed
    Bug(
        "a publication does not ask whether it is done",
        "publish/publishing.py",
        "            if not listed.isdisjoint(run.sstables.get(shard_id, ())):\n"
        "                return _Earlier(run.run_id)\n",
        "            pass\n",
        "a job that is run again writes its rows twice",
        _PUBLISH,
    ),
    Bug(
        "a job is asked for before the claim",
        "publish/publishing.py",
        "        found = _earlier_write(store, log, claimed, end)\n        if found is not None:\n",
        "        found = _earlier_write(store, log, claimed, end)\n"
        "        if found is not None and found.position is None:\n",
        "a task that is run again appends its rows twice",
        _PUBLISH,
    ),
    Bug(
        "a publication leaves no record of its start",
        "publish/publishing.py",
        "    if by_shard:\n        log.start(run)\n",
        "    if by_shard and not run.sstables:\n        log.start(run)\n",
        "the next run cannot know what the first one wrote",
        _PUBLISH,
    ),
    Bug(
        "proofs go with what carries them",
        "maintenance/garbage.py",
        "        shard.unsettled.get().preserve(shard.shard_id, "
        "positions=range(doomed[0], doomed[-1] + 1))\n",
        "        pass\n",
        "a task that wakes up late appends its rows again",
        (*_PUBLISH, *_GC),
    ),
    Bug(
        "a publication covers its pointer too early",
        "publish/publishing.py",
        "        manifests.commit_update(epoch, lambda manifest: _listing(manifest, entries, position))\n",
        "        manifests.commit_update(None, lambda manifest: _listing(manifest, entries, position))\n",
        "a run that was superseded moves the cursor past its successor's rows",
        _PUBLISH,
    ),
    Bug(
        "what was staged long ago is published",
        "publish/publishing.py",
        "        age.refuse_old()\n        manifests.commit_update(",
        "        manifests.commit_update(",
        "a publication that stood still for a day lists what is gone",
        _PUBLISH,
    ),
    Bug(
        "every pointer is in the feed",
        "publish/sstable_pointers.py",
        "        if later is not None and later.run_id == pointer.run_id:\n            return Fate.DROPPED\n",
        "",
        "the feed has rows twice",
        _PUBLISH,
    ),
    Bug(
        "a pointer that is open ends nothing",
        "publish/feed.py",
        "        return last.position if fate is Fate.OPEN else tip\n",
        "        return tip\n",
        "the feed cannot be read up to its end",
        _PUBLISH,
    ),
    Bug(
        "the feed goes on behind what it has read",
        "publish/feed.py",
        "            place[shard] = positions.stop\n        return place if max_bytes",
        "            place[shard] = positions.stop + 1\n        return place if max_bytes",
        "the feed lacks rows",
        _PUBLISH,
    ),
    Bug(
        "a pointer without a confirmation is dropped",
        "publish/sstable_pointers.py",
        "    published = _lists(pointer.sstables, [entry.path for entry in manifest.sstables])\n",
        "    published = False\n",
        "the feed lacks rows of a run that died",
        _PUBLISH,
    ),
)
