"""Seeds whose worlds failed once, and why; each runs in every `make test`."""

from __future__ import annotations

FOUND = {
    718: "a shard was opened while upkeep cleaned up the version of the base that was listed",
    3702: "a maker of a checkpoint that was taken for dead tagged a version, and died",
    4220: "a thread of Lance's own read the history of columns, and began threads of no world",
    4699: "an owner that closed while another waited for it",
    6107: "a service that came back wrote a put twice: allowed without an id, not with one",
    7887: "a follower that stood still in an SSTable found it collected, and was not told to begin anew",
    8216: "a writer that nobody closed tried its flush again and again, and the world did not end",
    8803: "a forged lease of no time made whoever waited list the storage without pause",
    14731: "a request was collected, and whoever had asked waited for as long as the owner lived",
    16467: "a load that its owner refused late ended the owner's writer, and its puts got the refusal",
    18430: "a checkpoint expired, and the next one of its name was taken for it",
    18897: "a stray fell into the slot of the log that a job had just missed in its search",
    30955: "an entry in an emptied slot passed for the proof of its put, and an acknowledged row was lost",
    32291: "the same, in a world whose clocks are set seldom",
    37447: "a collection that stood still deleted what was published meanwhile, because a clock was set back",
    52258: "a clock was set back, and a publication listed SSTables that were collected as abandoned",
    74394: "the same, with writers and a compactor",
    98646: "a successor settled an entry between two looks of its writer, and the row was denied",
    99405: "after a write that was held up for an hour a leader waited half an hour for company",
    99503: "the same, with a flush behind it",
    123157: "a stray before a pointer passed for the write of its job, and a collection marked it as written",
    153917: "an entry in an emptied slot, larger than the one of the listing, was called corrupt",
    187127: "a reader that stood still showed a stray in a slot that was collected, and took it back",
}
