"""Asking a shard's owner through the table: flush these shards, adopt these staged SSTables.

A request is an object in the owner's directory, and so is its answer::

    …/owners/{owner}/{request}.asked        written by whoever asks
    …/owners/{owner}/{request}.answered     written by the owner, when it is done with it

The owner looks for requests with its heartbeat, more often while some come, and carries them out one after
the other with the writers that it has open: in its own order. What it acknowledged before is older than
what it adopts, what it takes afterwards is newer. Whoever asked sees one of three things for each shard:

- **done**, also if it was done before: a flush may be repeated, and an adoption is part of a transaction
  whose records say whether the shard has it (``lancewal.publish``);
- **refused**, with the owner's reason, or the error that it met;
- **gone**: the owner has let the shard go, or was not heard of for a lease while we waited. Then we look
  again, ask whoever has the shard now, and claim it if nobody does. Should the owner only have stalled,
  its epoch is over by then: it can neither flush nor adopt any more.

A request that nobody waits for any more is carried out all the same, or never: both are harmless. Requests
that are forged or damaged are answered with a refusal; what they name has to be in the shard's own directory,
and a transaction has to have begun.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    StorageError,
)
from lancewal.format import ShardManifest, SsTableEntry, decode_record, encode_record
from lancewal.publish import (
    Adopt,
    Adoption,
    ShardWrite,
    Staged,
    StagedAge,
    Stager,
    Transaction,
    adopt_sstables,
    publish,
)
from lancewal.service.owners import (
    Owner,
    TakeOver,
    checked_take_over,
    is_dead_here,
    look_at_owners,
    storage_time,
)
from lancewal.service.presence import Presence, presence_at, serve_with
from lancewal.shard import ShardManifestStore, ShardRouter, has_unflushed_rows
from lancewal.storage import ObjectInfo, ObjectStore, in_thread, layout, ordered_map
from lancewal.writer import Intake, ShardWriter, flush_shard, flush_shards, seal_shard

logger = logging.getLogger(__name__)

_ASKED = ".asked"
_ANSWERED = ".answered"
#: Looks for an answer in a lease; where they are free there are more of them at first.
_LOOKS_IN_A_LEASE = 20
_FIRST_PAUSE = 0.01
#: How often a shard may change hands while something is asked of it.
_ROUNDS = 8
#: Shards of one request that an owner works on at a time.
_AT_A_TIME = 4
#: Leases after which an answer that nobody fetched is deleted.
_ANSWER_KEPT = 60
#: Errors that an owner may tell of, and whoever asked raises.
_ERRORS = {each.__name__: each for each in (StorageError, OutcomeUnknownError, ConflictError)}

Answer = Mapping[str, Any]


# ---------------------------------------------------------------------- whoever asks


def flush_through_owners(
    base: BaseTable,
    manifests: Sequence[ShardManifest],
    store: ObjectStore,
    config: ShardWriterConfig,
    take_over: TakeOver = "when_gone",
) -> None:
    """Flush shards: by their owners, here or elsewhere, and those that nobody has by draining them.

    "now" drains those of other processes too, "never" refuses them.
    """
    presence = presence_at(store.uri)
    # A writer here that was superseded is no owner.
    elsewhere = [
        manifest
        for manifest in manifests
        if (holder := presence.holder(manifest.shard_id)) is None or holder.epoch < manifest.writer_epoch
    ]
    settled: Mapping[UUID, int | Exception] = {}
    if take_over == "when_gone":
        settled = flush_by_owners(store, elsewhere)
    elif checked_take_over(take_over) == "never":
        settled = _left_alone(store, [manifest.shard_id for manifest in elsewhere])
    failed = {shard: each for shard, each in settled.items() if isinstance(each, Exception)}
    try:
        flush_shards(base, [m for m in manifests if m.shard_id not in settled], store, config)
    except PartialWriteError as error:
        failed |= error.failed
    if failed:
        raise PartialWriteError("flush", failed, {}) from next(iter(failed.values()))


def flush_one_through_owner(
    base: BaseTable, manifest: ShardManifest, store: ObjectStore, take_over: TakeOver = "when_gone"
) -> int:
    """As :func:`flush_through_owners`, for one shard; how many rows."""
    settled: int | Exception | None = None
    if take_over == "when_gone":
        settled = flush_by_owners(store, [manifest]).get(manifest.shard_id)
    elif checked_take_over(take_over) == "never":
        settled = _left_alone(store, [manifest.shard_id]).get(manifest.shard_id)
    if isinstance(settled, Exception):
        raise settled
    return flush_shard(base, manifest, store) if settled is None else settled


def flush_by_owners(store: ObjectStore, manifests: Sequence[ShardManifest]) -> dict[UUID, int | Exception]:
    """How many rows owners in other processes have flushed, by shard; without shards that nobody has."""
    by_id = {manifest.shard_id: manifest for manifest in manifests}

    def wanted(shard_id: UUID) -> bool:
        return has_unflushed_rows(by_id[shard_id], store)

    def request(shards: Sequence[UUID]) -> dict[str, object]:
        return {"do": "flush", "shards": {str(shard): None for shard in shards}}

    answers = _settled(store, list(by_id), wanted, request)
    return {s: each if isinstance(each, Exception) else int(each["rows"]) for s, each in answers.items()}


def publish_through_owners(
    base: BaseTable,
    store: ObjectStore,
    staged: Sequence[Staged],
    transaction: Transaction | None = None,
    take_over: TakeOver = "when_gone",
) -> list[ShardWrite]:
    """As :func:`lancewal.publish.publish`, but shards that somebody has are written by their owners.

    "now" takes them over instead, "never" refuses the whole before anything is written.
    """
    if take_over == "now":
        return publish(base, store, staged, transaction)
    if take_over == "never":
        for error in _left_alone(store, [each.shard.shard_id for each in staged]).values():
            raise error
    return publish(base, store, staged, transaction, adopt=adopt_by_owners(store))


def delete_through_owners(base: BaseTable, store: ObjectStore, keys: Iterable[Any]) -> int:
    """Delete rows by key, by the owners of their shards and in their order; how many keys there were.

    Each of ``keys`` is what :meth:`TableWriter.delete` takes. A crash leaves some shards without their
    deletes; deleting again is harmless.
    """
    intake = Intake(base.schema, storage_version=base.storage_version)
    stager = Stager(base, store, ShardRouter.of_table(base, store))
    count = 0
    for some in keys:
        for tombstones in intake.deletes(some).batches:
            stager.add(tombstones)
            count += tombstones.num_rows
    publish_through_owners(base, store, stager.finish())
    return count


def seal_through_owner(base: BaseTable, store: ObjectStore, shard_id: UUID) -> None:
    """Seal a shard: an order to stop, which fences its owner, but lets it flush its memory first."""
    flush_by_owners(store, [ShardManifestStore(store, shard_id).require_latest()])
    seal_shard(base, store, shard_id)


def adopt_by_owners(store: ObjectStore) -> Adopt:
    """Has the owners of shards adopt SSTables, in this process or elsewhere."""

    def adopt(adoptions: Sequence[Adoption]) -> dict[UUID, ShardWrite | Exception]:
        presence = presence_at(store.uri)
        by_id = {each.shard_id: each for each in adoptions}
        found: dict[UUID, ShardWrite | Exception] = {}
        for shard_id, adoption in by_id.items():
            holder = presence.holder(shard_id)
            if holder is not None:
                try:
                    found[shard_id] = adopt_sstables(holder, store, adoption)
                except (FencedError, ClosedError) as error:
                    logger.info("shard %s was let go meanwhile: %s", shard_id, error)
                except LanceWalError as error:
                    found[shard_id] = error

        def request(shards: Sequence[UUID]) -> dict[str, object]:
            first = by_id[shards[0]]
            return {
                "do": "adopt",
                "app": first.transaction.app_id,
                "version": first.transaction.version,
                "run": first.run_id,
                "age": first.age.seconds,
                "shards": {str(s): [_plain_entry(entry) for entry in by_id[s].entries] for s in shards},
            }

        left = [shard_id for shard_id in by_id if shard_id not in found]
        try:
            answers = _settled(store, left, lambda shard_id: True, request)
        except LanceWalError as error:
            text = f"an owner was asked to adopt SSTables, and may have done so: {error}"
            answers = {shard_id: OutcomeUnknownError(text) for shard_id in left}
        for shard_id, answer in answers.items():
            found[shard_id] = answer if isinstance(answer, Exception) else _write_of(shard_id, answer)
        return found

    return adopt


def _left_alone(store: ObjectStore, shards: Sequence[UUID]) -> dict[UUID, Exception]:
    """The error for each shard that another process has, living or gone: ``take_over="never"``."""
    why = 'take_over="never" leaves it alone, living or gone'
    owners = _owners_of(store, shards, also_gone=True)
    return {shard: owner.error(shard, why) for shard, owner in owners.items()}


def may_claim(store: ObjectStore, take_over: TakeOver) -> bool:
    """Whether rows may go to logs, whose shards are claimed for it.

    Else they are staged, and :func:`publish_through_owners` says for each shard who writes it, or refuses.
    """
    if take_over == "now":
        return True
    return not is_owned(store, also_gone=take_over == "never")


def is_owned(store: ObjectStore, *, also_gone: bool = False) -> bool:
    """Whether somebody has shards of the table and is not gone: then rows go through owners."""
    presence = presence_at(store.uri)
    if presence.shards():
        return True
    try:
        others = [each for each in look_at_owners(store) if each.owner_id != presence.owner_id]
        return any(each.shards and (also_gone or not each.gone) for each in others)
    except LanceWalError as error:
        logger.warning("the owners of %s are not known: %s", store.uri, error)
        return False


def _settled(
    store: ObjectStore,
    shards: Sequence[UUID],
    wanted: Callable[[UUID], bool],
    request: Callable[[Sequence[UUID]], dict[str, object]],
) -> dict[UUID, Answer | Exception]:
    """Ask until every shard's owner has answered; shards whose owner is gone are left out."""
    settled: dict[UUID, Answer | Exception] = {}
    left = list(shards)
    gone: set[str] = set()
    for _ in range(_ROUNDS):
        owners = {s: o for s, o in _owners_of(store, left).items() if o.owner_id not in gone}
        owned = {s: owner for s, owner in owners.items() if wanted(s)}
        # What is owned and needs nothing is settled: whoever drained it later would stop its owner.
        settled |= {shard: {"rows": 0} for shard in owners.keys() - owned.keys()}
        left = [shard for shard in left if shard not in settled]
        by_owner: dict[str, list[UUID]] = {}
        for shard, owner in owned.items():
            by_owner.setdefault(owner.owner_id, []).append(shard)
        if not by_owner:
            break
        asked = list(by_owner.values())
        calls = [partial(_ask, store, owned[some[0]], request(some)) for some in asked]
        for some, answer in zip(asked, ordered_map(_called, calls, len(calls)), strict=True):
            if answer is None:
                gone.add(owned[some[0]].owner_id)
            for shard in some:
                outcome = _outcome(shard, owned[shard], answer)
                if outcome is not None:
                    settled[shard] = outcome
        left = [shard for shard in left if shard not in settled]
    return settled


def _called(call: Callable[[], Answer | None]) -> Answer | None:
    return call()


def _owners_of(store: ObjectStore, shards: Sequence[UUID], *, also_gone: bool = False) -> dict[UUID, Owner]:
    """Those in other processes that have one of the shards and are not gone."""
    if not shards:
        return {}
    own = presence_at(store.uri).owner_id
    try:
        found_owners = [each for each in look_at_owners(store) if each.owner_id != own]
        owners = [each for each in found_owners if also_gone or not each.gone]
    except LanceWalError as error:
        logger.warning("the owners of %s are not known: %s", store.uri, error)
        return {}
    found: dict[UUID, Owner] = {}
    for shard in shards:
        named = [each for each in owners if shard in each.shards]
        if named:
            manifest = ShardManifestStore(store, shard).read_latest()
            epoch = 0 if manifest is None else manifest.writer_epoch
            owner = next((each for each in named if each.has(shard, epoch)), None)
            if owner is not None:
                found[shard] = owner
    return found


def _ask(store: ObjectStore, owner: Owner, request: Mapping[str, object]) -> Answer | None:
    """The owner's answer; ``None`` when it is gone."""
    name = f"{layout.owner_dir(owner.owner_id)}/{secrets.token_hex(8)}"
    asked, answered = f"{name}{_ASKED}", f"{name}{_ANSWERED}"
    record = layout.owner_record(owner.owner_id)
    lease = owner.lease.total_seconds() + (0.0 if store.is_local else 1.0)
    longest = min(lease / _LOOKS_IN_A_LEASE, 0.5)
    pause = _FIRST_PAUSE if store.is_local else longest
    store.put(asked, encode_record(request))
    try:
        heard, heard_at = owner.last_beat, time.monotonic()
        while not is_dead_here(owner):
            infos = {info.path: info for info in store.list(layout.owner_dir(owner.owner_id))}
            if answered in infos:
                return decode_record(store.get(answered), must_have_checksum=True)
            if record not in infos:
                return None
            if infos[record].modified != heard:
                heard, heard_at = infos[record].modified, time.monotonic()
            elif time.monotonic() - heard_at > lease:
                return None
            time.sleep(min(pause, longest))
            pause *= 1.3
        return None
    except (ValueError, FileNotFoundError) as error:
        raise OutcomeUnknownError(
            f"the answer of process {owner.pid} on {owner.host} is damaged: {error}"
        ) from error
    finally:
        _delete(store, [asked, answered])


def _outcome(shard: UUID, owner: Owner, answer: Answer | None) -> Answer | Exception | None:
    """What became of one shard; ``None`` where the owner has let it go."""
    if answer is None:
        return None
    each = answer.get("shards", {}).get(str(shard), {"error": "", "text": answer.get("refused", "no answer")})
    if "error" not in each:
        return None if each.get("gone") else each
    if each["error"] in _ERRORS:
        return _ERRORS[each["error"]](f"process {owner.pid} on {owner.host}: {each['text']}")
    return owner.error(shard, f"it refused: {each['text']}")


# ---------------------------------------------------------------------- the owner


def serve_requests(presence: Presence, store: ObjectStore) -> bool:
    """Look for requests to this process; whether there are any. They are carried out in another thread."""
    infos = store.list(layout.owner_dir(presence.owner_id))
    answered = {info.path.removesuffix(_ANSWERED) for info in infos if info.path.endswith(_ANSWERED)}
    waiting = [
        info
        for info in infos
        if info.path.endswith(_ASKED) and info.path.removesuffix(_ASKED) not in answered
    ]
    _clean_up(presence, store, infos)
    if waiting:
        _start(presence, store, sorted(waiting, key=lambda info: (info.modified, info.path)))
    return bool(waiting)


def _start(presence: Presence, store: ObjectStore, waiting: Sequence[ObjectInfo]) -> None:
    """Carry requests out, unless those of an earlier look are still under way."""
    if not presence.serving.acquire(blocking=False):
        return

    def work() -> None:
        try:
            for info in waiting:
                try:
                    _answer(presence, store, info)
                except Exception:  # the next look tries it again; those behind it need not wait for that
                    logger.exception("the request %s to %s was not answered", info.path, presence.uri)
        finally:
            presence.serving.release()

    in_thread(work, "lancewal-requests")


def _answer(presence: Presence, store: ObjectStore, info: ObjectInfo) -> None:
    path = info.path
    answered = f"{path.removesuffix(_ASKED)}{_ANSWERED}"
    try:
        if store.head(answered) is not None:
            return  # by an earlier look that has ended since
        request = decode_record(store.get(path), must_have_checksum=True)
        # By the storage's clock as it is now: this process may have stood still since it last looked.
        age = max((storage_time(store) - info.modified).total_seconds(), 0.0)
        answer: dict[str, object] = {"shards": _carried_out(presence, store, request, age)}
    except FileNotFoundError:
        return  # withdrawn
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, InvalidInputError) as error:
        logger.warning("the request %s is refused: %s", path, error)
        answer = {"refused": f"the request is damaged ({error!r})"}
    store.put(answered, encode_record(answer), durable=False)


def _carried_out(
    presence: Presence, store: ObjectStore, request: Mapping[str, Any], asked_ago: float
) -> dict[str, Answer]:
    shards = {UUID(shard): what for shard, what in request["shards"].items()}
    work: Callable[[ShardWriter, UUID], Answer]
    if request["do"] == "flush":
        work = _flush
    elif request["do"] == "adopt":
        transaction = Transaction(str(request["app"]), int(request["version"]))
        run, age = str(request["run"]), StagedAge(float(request["age"]) + asked_ago)
        adoptions = {
            shard: Adoption(shard, tuple(_entry(shard, each) for each in what), transaction, run, age)
            for shard, what in shards.items()
        }

        def work(writer: ShardWriter, shard: UUID) -> Answer:
            written = adopt_sstables(writer, store, adoptions[shard])
            return {"rows": written.rows, "skipped": written.skipped, "position": written.position}

    else:
        raise ValueError(f"nobody knows how to {request['do']!r}")

    def one(shard: UUID) -> Answer:
        writer = presence.holder(shard)
        if writer is None:
            return {"gone": True}
        try:
            return work(writer, shard)
        except (FencedError, ClosedError):
            return {"gone": True}
        except LanceWalError as error:
            logger.warning("a request was not carried out: %s", error, extra={"shard": str(shard)})
            return {"error": type(error).__name__, "text": str(error)}
        except Exception as error:
            logger.exception("a request failed unexpectedly", extra={"shard": str(shard)})
            return {"error": OutcomeUnknownError.__name__, "text": repr(error)}

    return {str(s): each for s, each in zip(shards, ordered_map(one, shards, _AT_A_TIME), strict=True)}


def _flush(writer: ShardWriter, shard: UUID) -> Answer:
    before = writer.stats().memtable_flush_rows
    writer.force_seal_active()
    writer.wait_for_flush_drain()
    return {"rows": writer.stats().memtable_flush_rows - before}


def _clean_up(presence: Presence, store: ObjectStore, infos: Sequence[ObjectInfo]) -> None:
    """Delete answers that nobody fetched, by the storage's clock, of which our own record is a reading."""
    record = layout.owner_record(presence.owner_id)
    now = next((info.modified for info in infos if info.path == record), None)
    if now is None:
        return
    kept = presence.lease * _ANSWER_KEPT
    old = [i.path for i in infos if i.path.endswith(_ANSWERED) and now - i.modified > kept]
    if old:
        _delete(store, [*(f"{path.removesuffix(_ANSWERED)}{_ASKED}" for path in old), *old])


def _delete(store: ObjectStore, paths: Sequence[str]) -> None:
    try:
        store.delete_many(paths)
    except LanceWalError as error:
        logger.debug("requests stay for garbage collection: %s", error)


# ---------------------------------------------------------------------- as it is stored


def _plain_entry(entry: SsTableEntry) -> dict[str, object]:
    return {**asdict(entry), "unknown": entry.unknown.hex()}


def _entry(shard_id: UUID, stored: Mapping[str, Any]) -> SsTableEntry:
    layout.sstable_dir(shard_id, str(stored["path"]))  # refuses a name that leads out of the shard

    def number(name: str) -> int | None:
        return None if stored[name] is None else int(stored[name])

    return SsTableEntry(
        int(stored["generation"]),
        str(stored["path"]),
        number("in_memory_bytes"),
        number("physical_rows"),
        number("primary_key_bytes"),
        str(stored["notes"]),
        bytes.fromhex(stored["unknown"]),
    )


def _write_of(shard_id: UUID, answer: Answer) -> ShardWrite:
    position = answer["position"]
    return ShardWrite(
        shard_id, int(answer["rows"]), bool(answer["skipped"]), None if position is None else int(position)
    )


serve_with(serve_requests)
