"""A writer is killed in the middle of its work; the next one goes on where it was."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time

from demo.corpus import NOTE, Edition, remarks, rows
from demo.crasher import note
from demo.stage import Stage, note_texts


def kill_writers(stage: Stage) -> None:
    """Kill writers of one shard, one after the other, and recover what they acknowledged."""
    texts = [document.text for document in remarks()]
    first = 0
    for number in range(1, stage.scale.kills + 1):
        acknowledged = _write_and_kill(stage, first)
        stage.measured.mark("writer killed")
        found = note_texts(stage.open().scan(["kind", "name", "text"], f"kind = '{NOTE}'").to_table())
        wanted = {(NOTE, note(each, "").name): texts[each % len(texts)] for each in range(len(found))}
        # The put under way when the signal came may be durable without having been acknowledged.
        held = found == wanted and acknowledged < len(found) <= acknowledged + 2
        stage.narration.check(
            f"kill {number}: all {acknowledged + 1 - first} notes that were acknowledged are there",
            held,
            f"{len(found)} found, {acknowledged + 1} acknowledged",
        )
        stage.notes.update(found)
        first = len(found)
    _recover(stage, first)


def _write_and_kill(stage: Stage, first: int) -> int:
    """The number of the last note that a child acknowledged before it was killed."""
    command = [sys.executable, "-m", "demo.crasher", stage.uri, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        seen = [int(line) for line in itertools.islice(child.stdout, stage.scale.puts_per_kill)]
        child.send_signal(signal.SIGKILL)
        seen += [int(line) for line in child.stdout if line.endswith("\n")]
    return seen[-1]


def _recover(stage: Stage, first: int) -> None:
    added: Edition = note(first, "The writer that took over from the one that was killed was here.")
    began = time.perf_counter()
    with stage.open().writer() as writer:
        writer.put(rows([added]))
        seconds = time.perf_counter() - began
        replayed = writer.stats().replayed_rows
    stage.notes[added.kind, added.name] = added.text
    stage.narration.say(
        f"the next writer took the shard over, replayed {replayed} rows from its log and wrote on, "
        f"all in {seconds * 1e3:.0f} ms"
    )
    found = note_texts(stage.open().scan(["kind", "name", "text"], f"kind = '{NOTE}'").to_table())
    stage.narration.check("nothing is lost, nothing is there twice", found == stage.notes)
