"""ShardManifestStore: one newest version for everybody, one holder at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

import pytest

from lancewal.errors import (
    ConflictError,
    CorruptManifestError,
    FencedError,
    InvalidInputError,
    OutcomeUnknownError,
    SealedShardError,
)
from lancewal.format.shard_manifest import (
    ShardFieldEntry,
    ShardManifest,
    ShardStatus,
    SsTableEntry,
    encode_manifest,
)
from lancewal.shard.manifest import MAX_COMMIT_ATTEMPTS, ShardManifestStore
from lancewal.storage import ObjectStore, PutOutcome, layout
from lancewal.storage.backend import TransientError
from lancewal.storage.clock import RECHECK_AFTER
from tests.faults import FaultyBackend, FaultyStore
from tests.shard.support import SHARD, ManualClock, collect_manifests, contents, doing

BUCKET = ShardFieldEntry("bucket", b"\x03\0\0\0")
HINT = layout.version_hint(SHARD)


def raise_generation(manifest: ShardManifest) -> ShardManifest:
    return replace(manifest, current_generation=manifest.current_generation + 1)


def claimed(store: ObjectStore, times: int) -> ShardManifestStore:
    """A shard with ``times`` versions, each a claim."""
    manifests = ShardManifestStore(store, SHARD)
    for _ in range(times):
        manifests.claim_epoch()
    return manifests


def newest(store: ObjectStore) -> ShardManifest:
    """What a process that knows nothing yet reads."""
    return ShardManifestStore(store, SHARD).require_latest()


# ---------------------------------------------------------------- reading the newest


def test_a_shard_without_a_manifest(memory_store: ObjectStore) -> None:
    manifests = ShardManifestStore(memory_store, SHARD)
    assert manifests.read_latest() is None
    with pytest.raises(InvalidInputError, match=str(SHARD)):
        manifests.require_latest()


def test_every_commit_is_seen_by_everybody(any_store: ObjectStore) -> None:
    ours, theirs = ShardManifestStore(any_store, SHARD), ShardManifestStore(any_store, SHARD)
    for version in range(1, 8):
        (ours if version % 3 else theirs).claim_epoch()
        assert ours.require_latest().version == theirs.require_latest().version == version
    assert newest(any_store).writer_epoch == 7


@pytest.mark.parametrize("scan_batch_size", [1, 2, 7])
@pytest.mark.parametrize("versions", [1, 2, 3, 40])
@pytest.mark.parametrize(
    "hint",
    [
        None,
        b"",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b'{"version":null}',
        b'{"version":"2"}',
        b'{"version":true}',
        b'{"version":2.0}',
        b'{"version":0}',
        b'{"version":-1}',
        b'{"version":1}',
        b'{"version":2}',
        b'{"version":41}',
        b'{"version":99999999999999999999999}',
        b'{"other":1}',
        b"[" * 100_000,
    ],
    ids=lambda hint: "missing" if hint is None else repr(hint[:24]),
)
def test_any_hint_is_survived(
    memory_store: ObjectStore, hint: bytes | None, versions: int, scan_batch_size: int
) -> None:
    claimed(memory_store, versions)
    if hint is None:
        memory_store.delete(HINT)
    else:
        memory_store.put(HINT, hint)
    manifests = ShardManifestStore(memory_store, SHARD, scan_batch_size)
    assert manifests.require_latest().version == versions
    assert manifests.claim_epoch()[0] == versions + 1


def test_a_commit_stands_although_its_hint_could_not_be_written(faulty: FaultyStore) -> None:
    faulty.faults.fail("put", where="version_hint", times=None)
    assert claimed(faulty, 3).require_latest().version == 3
    assert ShardManifestStore(faulty, SHARD).read_hint() is None
    assert newest(faulty).version == 3


def test_the_hint_can_be_repaired(memory_store: ObjectStore) -> None:
    manifests = claimed(memory_store, 3)
    memory_store.put(HINT, b"garbage")
    manifests.repair_hint()
    assert memory_store.get(HINT) == b'{"version":3}'


def test_looking_again_costs_no_listing(faulty: FaultyStore) -> None:
    manifests = claimed(faulty, 3)
    faulty.faults.clear()
    manifests.check_fenced(3)
    assert faulty.faults.count("list") == faulty.faults.count("get") == 0
    assert faulty.faults.count("head") == 3


def test_a_version_that_came_while_others_were_probed(faulty: FaultyStore) -> None:
    # The probe of version 3 misses it, the probe of version 4 finds that one.
    manifests = claimed(faulty, 2)
    rival = ShardManifestStore(faulty.inner, SHARD)

    def two_more() -> None:
        rival.claim_epoch()
        rival.claim_epoch()

    faulty.faults.before("head", two_more, where=layout.manifest_file(SHARD, 4))
    assert manifests.require_latest().version == 4


def test_a_version_that_vanished_before_it_was_read(faulty: FaultyStore) -> None:
    claimed(faulty.inner, 2)
    rival = ShardManifestStore(faulty.inner, SHARD)

    def supersede() -> None:
        rival.claim_epoch()
        collect_manifests(faulty.inner, 2)

    faulty.faults.before("get", supersede, where=layout.manifest_file(SHARD, 2))
    assert newest(faulty).version == 3


def test_a_shard_that_was_deleted_is_gone(memory_store: ObjectStore) -> None:
    manifests = claimed(memory_store, 3)
    memory_store.delete_prefix(layout.shard_dir(SHARD))
    assert manifests.read_latest() is None


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"not a manifest"])
def test_a_manifest_that_does_not_parse_stops_everything(memory_store: ObjectStore, data: bytes) -> None:
    claimed(memory_store, 1)
    memory_store.put_if_absent(layout.manifest_file(SHARD, 2), data)
    before = contents(memory_store)
    manifests = ShardManifestStore(memory_store, SHARD)
    attempts: list[Callable[[], object]] = [
        manifests.read_latest,
        manifests.claim_epoch,
        manifests.initialize_shard,
        lambda: manifests.commit_update(1, raise_generation),
        lambda: manifests.check_fenced(1),
    ]
    for attempt in attempts:
        with pytest.raises(CorruptManifestError, match=rf"manifest version 2 of shard {SHARD}"):
            attempt()
    assert contents(memory_store) == before


def test_a_manifest_of_another_shard_stops_everything(memory_store: ObjectStore) -> None:
    stray = ShardManifest(version=1, writer_epoch=5, shard_id=UUID(int=5))
    memory_store.put_if_absent(layout.manifest_file(SHARD, 1), encode_manifest(stray))
    with pytest.raises(CorruptManifestError, match=f"belongs to shard {UUID(int=5)}"):
        ShardManifestStore(memory_store, SHARD).claim_epoch()


def test_a_scan_batch_of_nothing_is_refused(memory_store: ObjectStore) -> None:
    with pytest.raises(InvalidInputError, match="manifest_scan_batch_size"):
        ShardManifestStore(memory_store, SHARD, 0)


# ---------------------------------------------------------------- claims


def test_a_claim_raises_the_epoch_and_keeps_the_rest(any_store: ObjectStore) -> None:
    manifests = ShardManifestStore(any_store, SHARD)
    manifests.initialize_shard(1, [BUCKET])
    epoch, _ = manifests.claim_epoch(1)
    sstable = SsTableEntry(1, "0a1b2c3d_gen_1", 10, 2, 8)
    filled = manifests.commit_update(
        epoch,
        lambda m: replace(
            m,
            sstables=(sstable,),
            current_generation=2,
            replay_after_wal_entry_position=4,
            wal_entry_position_last_seen=5,
        ),
    )
    again, manifest = ShardManifestStore(any_store, SHARD).claim_epoch(1)
    assert again == 2
    assert manifest == replace(filled, version=filled.version + 1, writer_epoch=2)


def test_the_first_claim_makes_the_shard(memory_store: ObjectStore) -> None:
    epoch, manifest = ShardManifestStore(memory_store, SHARD).claim_epoch(7)
    assert (epoch, manifest.version, manifest.writer_epoch, manifest.shard_spec_id) == (1, 1, 1, 7)
    assert newest(memory_store) == manifest


def test_a_sealed_shard_refuses_claims_before_anything_is_written(any_store: ObjectStore) -> None:
    manifests = claimed(any_store, 1)
    manifests.seal(1)
    before = contents(any_store)
    with pytest.raises(SealedShardError, match=str(SHARD)):
        manifests.claim_epoch()
    assert contents(any_store) == before
    manifests.unseal()
    assert manifests.claim_epoch()[0] == 2


def test_a_spec_mismatch_is_found_before_the_epoch_is_raised(any_store: ObjectStore) -> None:
    manifests = ShardManifestStore(any_store, SHARD)
    manifests.initialize_shard(3)
    before = contents(any_store)
    with pytest.raises(InvalidInputError, match=rf"{SHARD} belongs to sharding spec 3"):
        manifests.claim_epoch(4)
    assert contents(any_store) == before
    assert newest(any_store).writer_epoch == 0


def test_a_shard_that_is_sealed_while_a_claim_is_under_way_refuses_it(faulty: FaultyStore) -> None:
    claimed(faulty.inner, 1)
    faulty.faults.before("put_if_absent", doing(lambda: claimed(faulty.inner, 0).seal(1)))
    with pytest.raises(SealedShardError):
        ShardManifestStore(faulty, SHARD).claim_epoch()
    assert newest(faulty).version == 2


def test_a_claim_that_lost_its_race_takes_the_next_epoch(faulty: FaultyStore) -> None:
    claimed(faulty.inner, 1)
    faulty.faults.before("put_if_absent", doing(lambda: claimed(faulty.inner, 3)))
    epoch, manifest = ShardManifestStore(faulty, SHARD).claim_epoch()
    assert (epoch, manifest.version) == (5, 5)


def test_a_lost_reply_to_a_claim_is_not_taken_for_a_rival(memory_store: ObjectStore) -> None:
    backend = FaultyBackend(memory_store._backend)
    store = ObjectStore(memory_store.uri, backend, sleep=lambda _: None)
    manifests = ShardManifestStore(store, SHARD)
    for epoch in (1, 2):
        backend.faults.fail("create", after=True, error=TransientError("the reply was lost"))
        assert manifests.claim_epoch()[0] == epoch
    assert newest(memory_store).version == 2


def test_a_rivals_equal_claim_is_not_taken_for_ones_own(faulty: FaultyStore) -> None:
    # Both write epoch 2 at version 2 with the same content but for the write id.
    claimed(faulty.inner, 1)
    faulty.faults.before("put_if_absent", doing(lambda: claimed(faulty.inner, 1)))
    assert ShardManifestStore(faulty, SHARD).claim_epoch()[0] == 3


def test_a_claim_whose_outcome_is_unknown_leaves_a_claimable_shard(faulty: FaultyStore) -> None:
    faulty.faults.fail("put_if_absent", after=True)
    manifests = ShardManifestStore(faulty, SHARD)
    with pytest.raises(OutcomeUnknownError):
        manifests.claim_epoch()
    assert manifests.claim_epoch()[0] == 2


def test_a_commit_that_could_not_be_looked_up_may_count(faulty: FaultyStore, clock: ManualClock) -> None:
    """It was written after a stall, and whether its slot had been emptied meanwhile is not known."""
    manifests = ShardManifestStore(faulty, SHARD, clock=clock)
    manifests.claim_epoch()
    faulty.faults.before("put_if_absent", clock.stall)
    faulty.faults.fail("list", where="manifest")
    with pytest.raises(OutcomeUnknownError, match="version 2 was written"):
        manifests.commit_update(1, lambda m: replace(m, wal_entry_position_last_seen=9))
    assert manifests.require_latest().wal_entry_position_last_seen == 9


def test_claims_that_always_lose_are_given_up(memory_store: ObjectStore) -> None:
    class Contested(FaultyStore):
        def put_if_absent(self, path: str, data: object) -> PutOutcome:
            self.faults.run("put_if_absent", path, lambda: None)
            return PutOutcome.EXISTS

    store = Contested(memory_store)
    with pytest.raises(ConflictError, match=str(SHARD)):
        ShardManifestStore(store, SHARD).claim_epoch()
    assert store.faults.count("put_if_absent") == MAX_COMMIT_ATTEMPTS
    assert contents(memory_store) == {}


# ---------------------------------------------------------------- the fence


def test_a_claim_fences_the_holder(any_store: ObjectStore) -> None:
    old = claimed(any_store, 1)
    old.check_fenced(1)
    claimed(any_store, 1)
    with pytest.raises(FencedError) as refusal:
        old.check_fenced(1)
    assert (refusal.value.local_epoch, refusal.value.stored_epoch) == (1, 2)
    assert refusal.value.shard_id == SHARD
    before = contents(any_store)
    with pytest.raises(FencedError):
        old.commit_update(1, raise_generation)
    with pytest.raises(FencedError):
        old.seal(1)
    assert contents(any_store) == before


def test_a_claim_during_a_commit_fences_it(faulty: FaultyStore) -> None:
    old = claimed(faulty, 1)
    faulty.faults.before("put_if_absent", doing(lambda: claimed(faulty.inner, 1)))
    with pytest.raises(FencedError, match="at a manifest commit"):
        old.commit_update(1, raise_generation)
    assert newest(faulty).current_generation == 1


# ---------------------------------------------------------------- commits


def test_a_commit_that_lost_its_race_is_applied_to_the_winners(faulty: FaultyStore) -> None:
    manifests = claimed(faulty, 1)
    rival = ShardManifestStore(faulty.inner, SHARD)
    faulty.faults.before(
        "put_if_absent",
        doing(lambda: rival.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=9))),
    )
    committed = manifests.commit_update(1, raise_generation)
    assert (committed.version, committed.current_generation, committed.wal_entry_position_last_seen) == (
        3,
        2,
        9,
    )
    assert newest(faulty) == committed


def test_a_change_that_changes_nothing_commits_nothing(memory_store: ObjectStore) -> None:
    manifests = claimed(memory_store, 1)
    before = contents(memory_store)
    assert manifests.commit_update(1, lambda m: m).version == 1
    assert contents(memory_store) == before


def test_a_change_cannot_touch_version_or_epoch(memory_store: ObjectStore) -> None:
    manifests = claimed(memory_store, 1)
    committed = manifests.commit_update(1, lambda m: replace(m, version=50, writer_epoch=50))
    assert (committed.version, committed.writer_epoch) == (2, 1)


def test_maintenance_commits_beside_a_holder(memory_store: ObjectStore) -> None:
    holder = claimed(memory_store, 1)
    ShardManifestStore(memory_store, SHARD).commit_update(None, raise_generation)
    holder.check_fenced(1)
    assert holder.commit_update(1, raise_generation).current_generation == 3


def test_an_invalid_change_is_refused_before_anything_is_written(memory_store: ObjectStore) -> None:
    manifests = claimed(memory_store, 1)
    before = contents(memory_store)
    with pytest.raises(InvalidInputError, match=f"version 2 of shard {SHARD}"):
        manifests.commit_update(1, lambda m: replace(m, sstables=(SsTableEntry(1, "../outside"),)))
    assert contents(memory_store) == before


def test_commits_to_a_shard_that_does_not_exist_are_refused(memory_store: ObjectStore) -> None:
    with pytest.raises(InvalidInputError, match="no manifest"):
        ShardManifestStore(memory_store, SHARD).commit_update(None, raise_generation)
    assert contents(memory_store) == {}


def test_sealing_twice_is_sealing_once(memory_store: ObjectStore) -> None:
    manifests = claimed(memory_store, 1)
    assert manifests.seal(1) == manifests.seal(1)
    assert manifests.require_latest().status is ShardStatus.SEALED
    assert manifests.unseal() == manifests.unseal()
    assert newest(memory_store).version == 3


# ---------------------------------------------------------------- initialisation


def test_a_shard_is_initialised_with_its_field_values(any_store: ObjectStore) -> None:
    made = ShardManifestStore(any_store, SHARD).initialize_shard(1, [BUCKET])
    assert (made.version, made.writer_epoch, made.shard_spec_id) == (1, 0, 1)
    assert newest(any_store).field_values == {"bucket": BUCKET.value}
    # The first writer is still the first one: no sentinel is due.
    assert ShardManifestStore(any_store, SHARD).claim_epoch(1)[0] == 1


def test_a_shard_that_was_made_the_same_way_is_left_as_it_is(memory_store: ObjectStore) -> None:
    manifests = ShardManifestStore(memory_store, SHARD)
    manifests.initialize_shard(1, [BUCKET])
    _, held = manifests.claim_epoch(1)
    before = contents(memory_store)
    assert ShardManifestStore(memory_store, SHARD).initialize_shard(1, [BUCKET]) == held
    assert contents(memory_store) == before


@pytest.mark.parametrize(
    ("spec_id", "entries"), [(2, [BUCKET]), (1, []), (1, [ShardFieldEntry("bucket", b"")])]
)
def test_a_shard_that_was_made_otherwise_is_refused(
    memory_store: ObjectStore, spec_id: int, entries: list[ShardFieldEntry]
) -> None:
    ShardManifestStore(memory_store, SHARD).initialize_shard(1, [BUCKET])
    before = contents(memory_store)
    with pytest.raises(InvalidInputError, match=f"shard {SHARD} exists with sharding spec 1"):
        ShardManifestStore(memory_store, SHARD).initialize_shard(spec_id, entries)
    assert contents(memory_store) == before


def test_two_that_initialise_at_once_agree(faulty: FaultyStore) -> None:
    rival = ShardManifestStore(faulty.inner, SHARD)
    faulty.faults.before("put_if_absent", doing(lambda: rival.initialize_shard(1, [BUCKET])))
    assert ShardManifestStore(faulty, SHARD).initialize_shard(1, [BUCKET]) == newest(faulty)


# ---------------------------------------------------------------- after garbage collection


def collected_meanwhile(store: ObjectStore, clock: ManualClock) -> Callable[[], None]:
    """What may happen while a process stands still: successors, collection, minutes."""

    def happen() -> None:
        claimed(store, 6)
        clock.stall()
        collect_manifests(store, newest(store).version - 1)

    return happen


def test_a_commit_into_an_emptied_slot_is_fenced(faulty: FaultyStore, clock: ManualClock) -> None:
    manifests = ShardManifestStore(faulty, SHARD, clock=clock)
    manifests.claim_epoch()
    faulty.faults.before("put_if_absent", collected_meanwhile(faulty.inner, clock))
    with pytest.raises(FencedError) as refusal:
        manifests.commit_update(1, raise_generation)
    assert refusal.value.stored_epoch == 7
    assert newest(faulty).version == 7


def test_a_claim_into_an_emptied_slot_does_not_count(faulty: FaultyStore, clock: ManualClock) -> None:
    claimed(faulty.inner, 1)
    faulty.faults.before("put_if_absent", collected_meanwhile(faulty.inner, clock))
    epoch, manifest = ShardManifestStore(faulty, SHARD, clock=clock).claim_epoch()
    assert (epoch, manifest.version) == (8, 8)
    assert newest(faulty).version == 8


def test_an_initialisation_into_an_emptied_slot_does_not_count(
    faulty: FaultyStore, clock: ManualClock
) -> None:
    faulty.faults.before("put_if_absent", collected_meanwhile(faulty.inner, clock))
    assert ShardManifestStore(faulty, SHARD, clock=clock).initialize_shard().version == 6


def test_a_stray_version_does_not_unfence_a_stalled_holder(
    memory_store: ObjectStore, clock: ManualClock
) -> None:
    stalled = ShardManifestStore(memory_store, SHARD, clock=clock)
    _, first = stalled.claim_epoch()
    collected_meanwhile(memory_store, clock)()
    # Another thread of the stalled process, or its Lance, commits into an emptied slot.
    stray = replace(first, version=2)
    memory_store.put_if_absent(layout.manifest_file(SHARD, 1), encode_manifest(first))
    memory_store.put_if_absent(layout.manifest_file(SHARD, 2), encode_manifest(stray))
    with pytest.raises(FencedError):
        stalled.check_fenced(1)


def test_a_holder_that_stalls_while_it_looks_is_fenced(faulty: FaultyStore, clock: ManualClock) -> None:
    stalled = ShardManifestStore(faulty, SHARD, clock=clock)
    _, first = stalled.claim_epoch()

    def happen() -> None:
        collected_meanwhile(faulty.inner, clock)()
        # What it knew is back as a stray, so that only the clock tells.
        faulty.inner.put_if_absent(layout.manifest_file(SHARD, 1), encode_manifest(first))

    faulty.faults.before("head", happen, where=layout.manifest_file(SHARD, 2))
    with pytest.raises(FencedError):
        stalled.check_fenced(1)


@pytest.mark.parametrize("stray_version", [1, 3])
def test_a_hint_at_a_stray_version_does_not_fork_the_shard(
    memory_store: ObjectStore, clock: ManualClock, stray_version: int
) -> None:
    _, first = ShardManifestStore(memory_store, SHARD).claim_epoch()
    collected_meanwhile(memory_store, clock)()
    stray = replace(first, version=stray_version)
    memory_store.put_if_absent(layout.manifest_file(SHARD, stray_version), encode_manifest(stray))
    memory_store.put(HINT, b'{"version":%d}' % stray_version)
    assert ShardManifestStore(memory_store, SHARD).claim_epoch()[0] == 8


def test_a_holder_that_looked_recently_need_not_list(faulty: FaultyStore, clock: ManualClock) -> None:
    manifests = ShardManifestStore(faulty, SHARD, clock=clock)
    manifests.claim_epoch()
    for _ in range(3):
        clock.advance(RECHECK_AFTER.total_seconds() - 1)
        faulty.faults.clear()
        manifests.check_fenced(1)
        assert faulty.faults.count("list") == 0
    clock.advance(RECHECK_AFTER.total_seconds() + 1)
    manifests.check_fenced(1)
    assert faulty.faults.count("list") == 1


def test_a_commit_that_counted_before_a_stall_is_not_applied_twice(
    faulty: FaultyStore, clock: ManualClock
) -> None:
    manifests = ShardManifestStore(faulty, SHARD, clock=clock)
    manifests.claim_epoch()

    def to_generation_two(manifest: ShardManifest) -> ShardManifest:
        return manifest if manifest.current_generation == 2 else raise_generation(manifest)

    committed: list[ShardManifest] = []
    with faulty.faults.pause("put_if_absent", after=True) as pause:
        thread = threading.Thread(
            target=lambda: committed.append(manifests.commit_update(1, to_generation_two))
        )
        thread.start()
        pause.wait_until_reached()
        maintenance = ShardManifestStore(faulty.inner, SHARD)
        maintenance.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=5))
        clock.stall()
        pause.release()
        thread.join()
    assert (committed[0].version, committed[0].current_generation) == (3, 2)
    assert newest(faulty) == committed[0]
