"""Bugs in what came later: put ids and gathering, upkeep, checkpoints, sums, the memory budget, jobs."""

from __future__ import annotations

from tests.planted.bug import Bug

_PUT_IDS = ("tests/writer/test_put_ids.py",)
_GATHERING = ("tests/gateway/test_gathering.py", "tests/gateway/test_gateway.py")
_ROUNDS = ("tests/upkeep/test_rounds.py", "tests/upkeep/test_upkeeper.py")
_CHECKPOINTS = ("tests/maintenance/test_checkpoints.py",)
_SUMS = ("tests/maintenance/test_conserved.py",)
_CACHE = ("tests/storage/test_cache.py",)
_PUBLISH = ("tests/publish",)

NEWER_BUGS = (
    # ---------------------------------------------------- put ids, gathering
    Bug(
        "a put that landed is written again",
        "writer/put_ids.py",
        "                if put_id.number in session.landed:\n",
        "                if False:\n",
        "a client that lost a reply writes its rows twice",
        _PUT_IDS,
        simulated=False,
    ),
    Bug(
        "a writer does not know the ids of entries that were flushed",
        "writer/put_ids.py",
        "                for tag in self._earlier():\n",
        "                for tag in ():\n",
        "a put that is sent again to a stand-by lands twice",
        _PUT_IDS,
        simulated=False,
    ),
    Bug(
        "nobody waits for the same put that is under way",
        "writer/put_ids.py",
        "                first = session.under_way.get(put_id.number)\n",
        "                first = None\n",
        "a put that is sent again before its first try has ended lands twice",
        _PUT_IDS,
        simulated=False,
    ),
    Bug(
        "deletes go with puts in one message",
        "gateway/gathering.py",
        "            self.op == first.op\n            and self.schema is not None\n",
        "            self.schema is not None\n",
        "keys that were to be deleted are put, or the other way round",
        _GATHERING,
        simulated=False,
    ),
    Bug(
        "a put whose caller is gone is sent with others",
        "gateway/gathering.py",
        "        if not each.given_up:\n            num_bytes",
        "        if True:\n            num_bytes",
        "rows of a call that raised land all the same",
        _GATHERING,
        simulated=False,
    ),
    Bug(
        "numbers that are under way are settled",
        "gateway/remote_writer.py",
        "            return min(self._under_way, default=self._numbers + 1) - 1\n",
        "            return self._numbers - 1\n",
        "a put that is sent again is refused, or lands twice",
        _GATHERING,
        simulated=False,
    ),
    Bug(
        "a message that was refused is refused for all who are in it",
        "gateway/remote_writer.py",
        "                if len(group.puts) == 1:\n                    raise\n",
        "                raise\n",
        "one caller's bad rows fail the puts of others",
        _GATHERING,
        simulated=False,
    ),
    # ---------------------------------------------------------------- upkeep
    Bug(
        "what failed is tried again at once",
        "upkeep/rounds.py",
        "        return known is not None and self._clock() < known.until\n",
        "        return False\n",
        "work that cannot be done takes all the time there is",
        _ROUNDS,
    ),
    Bug(
        "pauses after failures do not grow",
        "upkeep/rounds.py",
        "        known.in_a_row += 1\n",
        "        known.in_a_row = 1\n",
        "work that cannot be done is tried every twenty seconds for ever",
        _ROUNDS,
    ),
    Bug(
        "what another process does is done as well",
        "upkeep/rounds.py",
        "            if is_done_elsewhere(self._store, read_duties(self._store).get(task.work)):\n",
        "            if False:\n",
        "every process of a service compacts the same rows",
        _ROUNDS,
    ),
    Bug(
        "a process that died at its work keeps others from it",
        "service/duties.py",
        "    if duty.machine == machine() and not process_runs(duty.pid, duty.started):\n",
        "    if False:\n",
        "nobody keeps the table in shape for as long as a record is believed",
        _ROUNDS,
    ),
    Bug(
        "upkeep never rests",
        "upkeep/upkeeper.py",
        "        return self._look_again(outcome.seconds * (1 / settings.max_share - 1))\n",
        "        return self._look_again(0.0)\n",
        "puts and reads wait for a compaction after the other",
        _ROUNDS,
        simulated=False,
    ),
    # ----------------------------------------------------------- checkpoints
    Bug(
        "a checkpoint has a version that was superseded before its tag",
        "maintenance/checkpoints.py",
        "        if reader.base().version == state.version:\n",
        "        if True:\n",
        "files of the version were cleaned up in between",
        _CHECKPOINTS,
    ),
    Bug(
        "a collection does not know of checkpoints that are being made",
        "maintenance/checkpoints.py",
        "        if stored.recorded is None and self.now - announced.modified < _ANNOUNCED_FOR:\n",
        "        if False:\n",
        "a checkpoint is made of files that are gone, or never",
        _CHECKPOINTS,
    ),
    Bug(
        "a collection takes what a checkpoint needs that is being made",
        "maintenance/checkpoints.py",
        '            return f"the checkpoint {name!r} is being made"\n',
        "            return None\n",
        "a checkpoint is returned whose files are gone",
        _CHECKPOINTS,
    ),
    Bug(
        "the tag of a dropped checkpoint stays",
        "maintenance/checkpoints.py",
        "            dataset.tags.delete(tag)\n        except ValueError as error:\n",
        "            pass\n        except ValueError as error:\n",
        "its version is never cleaned up",
        _CHECKPOINTS,
    ),
    Bug(
        "a checkpoint is kept for ever",
        "maintenance/checkpoints.py",
        "        if record.state is None or is_expired:\n",
        "        if record.state is None:\n",
        "files pile up behind checkpoints that are over",
        _CHECKPOINTS,
    ),
    Bug(
        "a checkpoint that nobody can read needs nothing",
        "maintenance/checkpoints.py",
        '            return f"the checkpoint {name!r} cannot be read, drop it to go on ({error})"\n',
        "            return None\n",
        "a damaged record lets a collection take the files of its checkpoint",
        _CHECKPOINTS,
    ),
    # -------------------------------------------------------- end-to-end sums
    Bug(
        "keys that were compacted and are not in the base are not told",
        "maintenance/conserved.py",
        "        if not seen.all():\n",
        "        if False:\n",
        "verify finds nothing where a compaction lost rows",
        _SUMS,
        simulated=False,
    ),
    Bug(
        "the sum of an append is not compared",
        "maintenance/conserved.py",
        "        if found != noted:\n",
        "        if found.rows < noted.rows:\n",
        "verify finds nothing where rows were appended twice or changed",
        _SUMS,
        simulated=False,
    ),
    Bug(
        "older versions of a key count in the sum of a log",
        "maintenance/conserved.py",
        "            hashes = hashes if newest is None else hashes[newest]\n",
        "",
        "verify takes a right SSTable for a wrong one",
        _SUMS,
        simulated=False,
    ),
    # ---------------------------------------------------------- memory budget
    Bug(
        "the cache grows beyond its budget",
        "storage/cache.py",
        "        while self._entries and self._kept_bytes + self._leased_bytes > self.max_bytes:\n",
        "        while self._entries and self._kept_bytes > self.max_bytes:\n",
        "leases of memory come on top of what is cached",
        _CACHE,
        simulated=False,
    ),
    Bug(
        "a lease is not given back",
        "storage/cache.py",
        "    def __del__(self) -> None:\n        self._cache._returned.append(self._num_bytes)\n",
        "",
        "after some scans nobody gets memory any more",
        _CACHE,
        simulated=False,
    ),
    # ------------------------------------------------------- jobs, run again
    Bug(
        "a version that is done is written again",
        "publish/transactions.py",
        "        return self.read().done >= self.transaction.version\n",
        "        return self.read().done > self.transaction.version\n",
        "a micro-batch that is run again lands twice",
        _PUBLISH,
    ),
    Bug(
        "the records of a version go with its end",
        "publish/transactions.py",
        "        self._forget(below=version)\n",
        "        self._forget(below=version + 1)\n",
        "a run that goes on beside it finds no trace of the first one",
        _PUBLISH,
    ),
    Bug(
        "an entry in an emptied slot proves a run",
        "publish/transactions.py",
        "    if not is_flushed(manifest, entry.position):\n        return False\n    if first",
        "    return False\n    if first",
        "rows of a job that nobody can read count as written",
        _PUBLISH,
    ),
)
