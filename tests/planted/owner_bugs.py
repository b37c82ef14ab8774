"""Bugs in the protocol of owners, requests and take-over, where safety never depends on records.

So most of them harm nobody's rows: they stop a writer that lives, or keep others from a shard of nobody.
"""

from __future__ import annotations

from tests.planted.bug import Bug

_OWNERS = ("tests/service/test_owners.py",)
_REQUESTS = ("tests/service/test_requests.py",)

OWNER_BUGS = (
    Bug(
        "an owner that was superseded keeps others out",
        "service/owners.py",
        "        return self.shards.get(shard_id, -1) >= max(epoch, 1)\n",
        "        return shard_id in self.shards\n",
        "a shard whose last owner closed it is refused for one that lost it before",
        _OWNERS,
    ),
    Bug(
        "a fresh record proves a life",
        "service/owners.py",
        "        if runs_here(owner) and age < owner.lease / 2:\n",
        "        if age < owner.lease / 2:\n",
        "a process that has just died elsewhere keeps others out",
        _OWNERS,
    ),
    Bug(
        "an owner that is silent for a moment is gone",
        "service/owners.py",
        "            max(age, unchanged) > _over(store, owner)\n",
        "            max(age, unchanged) > _over(store, owner) / 8\n",
        "writers that live are stopped",
        _OWNERS,
    ),
    Bug(
        "a process that died here is waited for",
        "service/owners.py",
        "    return _is_ours(owner) and not process_runs(owner.pid, owner.started)\n",
        "    return False\n",
        "a service that is started again waits for a lease",
        _OWNERS,
    ),
    Bug(
        "another process under the same number is the owner",
        "service/owners.py",
        "    return now is None or now == started\n",
        "    return True\n",
        "a dead owner seems to live while its number is used again",
        _OWNERS,
    ),
    Bug(
        "a lease has no limit",
        "service/owners.py",
        "            min(max(lease, timedelta(milliseconds=1)), _LONGEST_LEASE),\n",
        "            max(lease, timedelta(milliseconds=1)),\n",
        "a forged record keeps everybody out for years",
        _OWNERS,
    ),
    Bug(
        "a heartbeat writes nothing",
        "service/presence.py",
        "        self._due = time.monotonic() + self.interval\n        self._write(None)\n",
        "        self._due = time.monotonic() + self.interval\n",
        "whoever writes for longer than a lease is taken for gone",
        _OWNERS,
    ),
    Bug(
        "a claim is not named before the writer opens",
        "service/presence.py",
        "            self._lease = lease\n            self._changes += 1\n"
        "            change = self._changes\n        self._write(change)\n",
        "            self._lease = lease\n            self._changes += 1\n",
        "the next one takes the shard from a writer that has just opened it",
        _OWNERS,
    ),
    Bug(
        "a shard that was closed stays named",
        "service/presence.py",
        "                self._claimed.pop(shard_id, None)\n            self._changes += 1\n"
        "            change = self._changes\n        self._write(change)\n",
        "                self._claimed.pop(shard_id, None)\n",
        "whoever comes next waits for a heartbeat, or for the lease of a process that has ended",
        _OWNERS,
    ),
    Bug(
        "a shard is opened twice in a process",
        "service/presence.py",
        '        if take_over != "now" and presence.holder(shard_id) is not None:\n',
        "        if False:\n",
        "a service stops its own writer",
        _OWNERS,
    ),
    Bug(
        "never is sometimes",
        "service/presence.py",
        '                if take_over == "never" or not is_dead_here(owner):\n',
        "                if not is_dead_here(owner):\n",
        "a shard is taken although its caller said never",
        _OWNERS,
    ),
    Bug(
        "a service that lost its shard does not come back",
        "writer/table_writer.py",
        "        return slot.writer is not lost or "
        "slot.came_back + self._come_back_after <= time.monotonic()\n",
        "        return False\n",
        "callers of a service that was taken for gone get errors for ever",
        _OWNERS,
    ),
    Bug(
        "whoever asks has no patience",
        "service/requests.py",
        "            elif time.monotonic() - heard_at > lease:\n",
        "            elif time.monotonic() - heard_at > lease / 8:\n",
        "owners that live are stopped by whoever wanted a flush",
        _REQUESTS,
    ),
    Bug(
        "a flush is answered before it is done",
        "service/requests.py",
        '    return {"rows": writer.flush()}\n',
        '    writer.force_seal_active()\n    return {"rows": 0}\n',
        "whoever asked compacts without the rows",
        _REQUESTS,
    ),
    Bug(
        "an owner that was fenced says that it is done",
        "service/requests.py",
        "            return work(writer, shard)\n        except (FencedError, ClosedError):\n"
        '            return {"gone": True}\n',
        "            return work(writer, shard)\n        except (FencedError, ClosedError):\n"
        '            return {"rows": 0, "skipped": True, "position": None}\n',
        "rows of a job are lost, although it was told that they are there",
        _REQUESTS,
    ),
    Bug(
        "a refusal counts as gone",
        "service/requests.py",
        "    return owner.error(shard, f\"it refused: {each['text']}\")\n",
        "    return None\n",
        "an owner that refuses is stopped",
        _REQUESTS,
    ),
    Bug(
        "an adoption does not look for an earlier run",
        "publish/publishing.py",
        "        earlier = _earlier_write(store, log, held, find_tip(store, adoption.shard_id, held))\n"
        "        if earlier is None:\n            _require_announced",
        "        if earlier is None:\n            _require_announced",
        "a job that is run again is adopted twice",
        _REQUESTS,
    ),
    Bug(
        "SSTables are adopted that nobody announced",
        "publish/publishing.py",
        "            _require_announced(log, adoption)\n",
        "",
        "a forged request lists what is listed already",
        _REQUESTS,
    ),
    Bug(
        "what is adopted is older than rows that were acknowledged before",
        "writer/shard_writer.py",
        "                self._mode.flush()\n"
        "                try:\n                    result, manifest = commit(self._appender)\n",
        "                try:\n                    result, manifest = commit(self._appender)\n",
        "an older version of a key wins",
        _REQUESTS,
    ),
)
