"""Requests to a shard's owner through the table's storage: flush shards, or adopt staged SSTables.

A request is an object in the owner's directory, and so is its answer::

    …/owners/{owner}/{request}.asked        written by the requester
    …/owners/{owner}/{request}.answered     written by the owner, when it is done

The owner looks for requests with its heartbeat, and more often after a request. It executes requests one
after the other with its open writers. So there is one order: rows that it acknowledged before are older than
what it adopts, and rows that it accepts afterwards are newer. For each shard the requester sees one of three
outcomes:

- **done**, also if it was done before: a flush may be repeated, and an adoption is part of a transaction
  whose records say whether the shard has it (``lancewal.publish``);
- **refused**, with the owner's reason, or the error that occurred;
- **gone**: the owner has released the shard, or its heartbeat was missing for a lease while we waited. Then
  we look again, ask the new owner if there is one, and otherwise claim the shard. If the old owner was only
  stalled, it is fenced by then, and can neither flush nor adopt.

If the request is deleted, or its answer is damaged, the requester gets an
:class:`~lancewal.errors.OutcomeUnknownError`.

A request without a waiting requester may still be executed, or never: both are harmless. Forged or damaged
requests are refused. The SSTables that a request names must be in the shard's own directory, and its
transaction must have begun.
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
#: How often per lease a requester looks for an answer. On a local store, where looks are free, it looks more
#: often at first.
_LOOKS_IN_A_LEASE = 20
_FIRST_PAUSE = 0.01
#: How often a shard may change owners during a request.
_ROUNDS = 8
#: How many shards of one request an owner works on at a time.
_AT_A_TIME = 4
#: After so many leases an answer that was not fetched is deleted.
_ANSWER_KEPT = 60
#: How often a shard is claimed to be sealed, while a service takes it back.
_SEAL_ATTEMPTS = 4
#: Errors that an owner may report and the requester raises.
_ERRORS = {each.__name__: each for each in (StorageError, OutcomeUnknownError, ConflictError)}

Answer = Mapping[str, Any]


# ---------------------------------------------------------------------- the requester


def flush_through_owners(
    base: BaseTable,
    manifests: Sequence[ShardManifest],
    store: ObjectStore,
    config: ShardWriterConfig,
    take_over: TakeOver = "when_gone",
) -> None:
    """Flush shards through their owners, in this or another process; shards without an owner are drained.

    "now" also drains shards that other processes own; "never" refuses such shards.
    """
    presence = presence_at(store.uri)
    # A fenced writer of this process is not an owner.
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
    """Like :func:`flush_through_owners`, for one shard; returns how many rows were flushed."""
    settled: int | Exception | None = None
    if take_over == "when_gone":
        settled = flush_by_owners(store, [manifest]).get(manifest.shard_id)
    elif checked_take_over(take_over) == "never":
        settled = _left_alone(store, [manifest.shard_id]).get(manifest.shard_id)
    if isinstance(settled, Exception):
        raise settled
    return flush_shard(base, manifest, store) if settled is None else settled


def flush_by_owners(store: ObjectStore, manifests: Sequence[ShardManifest]) -> dict[UUID, int | Exception]:
    """Have owners in other processes flush; returns rows or error by shard, if the shard has an owner."""
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
    """Like :func:`lancewal.publish.publish`, but owners write the shards that they own.

    "now" takes these shards over instead; "never" refuses everything before anything is written.
    """
    if take_over == "now":
        return publish(base, store, staged, transaction)
    if take_over == "never":
        for error in _left_alone(store, [each.shard.shard_id for each in staged]).values():
            raise error
    return publish(base, store, staged, transaction, adopt=adopt_by_owners(store))


def delete_through_owners(base: BaseTable, store: ObjectStore, keys: Iterable[Any]) -> int:
    """Delete rows by key through the owners of their shards; returns how many keys there were.

    Each owner puts the deletes in order with its own writes. Each of ``keys`` has a form that
    :meth:`TableWriter.delete` accepts. After a crash some shards may lack their deletes; deleting again is
    harmless.
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
    """Seal a shard. Its owner flushes its memory first, and is then fenced.

    A service whose writer is fenced comes back with its next put, once in a lease. So it may claim the shard
    between our claim and the seal, and the next attempt succeeds.
    """
    flush_by_owners(store, [ShardManifestStore(store, shard_id).require_latest()])
    for attempt in range(1, _SEAL_ATTEMPTS + 1):
        try:
            seal_shard(base, store, shard_id)
            return
        except FencedError as error:
            if attempt == _SEAL_ATTEMPTS:
                raise
            logger.info("shard %s is not sealed yet: %s", shard_id, error)


def adopt_by_owners(store: ObjectStore) -> Adopt:
    """A function that lets the owners of shards adopt SSTables, in this process or elsewhere."""

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
    """The errors for shards with an owner in another process, living or gone: ``take_over="never"``."""
    why = 'take_over="never" leaves it alone, living or gone'
    owners = _owners_of(store, shards, also_gone=True)
    return {shard: owner.error(shard, why) for shard, owner in owners.items()}


def may_claim(store: ObjectStore, take_over: TakeOver) -> bool:
    """Whether rows may be written to logs, for which their shards are claimed.

    Otherwise the rows are staged, and :func:`publish_through_owners` decides for each shard which process
    writes it, or refuses.
    """
    if take_over == "now":
        return True
    return not is_owned(store, also_gone=take_over == "never")


def is_owned(store: ObjectStore, *, also_gone: bool = False) -> bool:
    """Whether a process that is not gone owns shards of the table; then rows go through owners."""
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
    """Ask until every shard's owner has answered; leaves out shards without an owner that is not gone."""
    settled: dict[UUID, Answer | Exception] = {}
    left = list(shards)
    gone: set[str] = set()
    for _ in range(_ROUNDS):
        owners = {s: o for s, o in _owners_of(store, left).items() if o.owner_id not in gone}
        owned = {s: owner for s, owner in owners.items() if wanted(s)}
        # Shards that are owned and need nothing are settled too: draining them later would stop their owner.
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
    """The owners of the shards in other processes, by shard; without owners that are gone."""
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
    """Send a request and wait for the owner's answer; ``None`` if the owner is gone."""
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
            if asked not in infos:
                # Collected, or cleaned up with its answer while this process was stopped. Nobody will answer
                # it any more, and an owner that lives would be waited for without end.
                raise OutcomeUnknownError(
                    f"the request to process {owner.pid} on {owner.host} was deleted before its answer was "
                    "read; it may have been carried out"
                )
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
    """The outcome for one shard; ``None`` if the owner has released it or is gone."""
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
    """Look for requests to this process; returns whether there are any. Another thread executes them."""
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
    """Execute requests in another thread, unless requests of an earlier look are still running."""
    if not presence.serving.acquire(blocking=False):
        return

    def work() -> None:
        try:
            for info in waiting:
                try:
                    _answer(presence, store, info)
                except Exception:  # the next look tries it again; later requests must not wait for that
                    logger.exception("the request %s to %s was not answered", info.path, presence.uri)
        finally:
            presence.serving.release()

    in_thread(work, "lancewal-requests")


def _answer(presence: Presence, store: ObjectStore, info: ObjectInfo) -> None:
    path = info.path
    answered = f"{path.removesuffix(_ASKED)}{_ANSWERED}"
    try:
        if store.head(answered) is not None:
            return  # answered after an earlier look
        request = decode_record(store.get(path), must_have_checksum=True)
        # Use a new reading of the storage's clock: this process may have been stalled since its last look.
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
    return {"rows": writer.flush()}


def _clean_up(presence: Presence, store: ObjectStore, infos: Sequence[ObjectInfo]) -> None:
    """Delete old answers that were not fetched; the time stamp of our own record gives the storage's time."""
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


# ---------------------------------------------------------------------- the stored form


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
