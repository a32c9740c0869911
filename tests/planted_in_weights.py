"""Planted bugs in how weights travel: `mutants.py` plants them too."""

from __future__ import annotations

_TESTS = "test_differences.py"
DIFFERENCE, DOWNLOADS = ("weights/difference.py", _TESTS), ("weights/downloads.py", "weights")
COPIES, OBJECTS = ("weights/copies.py", "weights"), ("weights/objects.py", "weights/test_objects.py")
PIECES = ("objects.py", "weights/test_objects.py")
CHECKPOINTS = ("training/checkpoint_objects.py", "training/test_checkpoint_objects.py")
SERVED = ("weights/http.py", _TESTS)
_FALLS_BACK = "except (WeightsUnavailable, BadTensorFile, WriteFailed) as error:"

WEIGHTS = {
    "a lost download begins again": (DOWNLOADS, "began = into.tell()", "began = into.seek(0)"),
    "a download is not checked": (COPIES, "        tensors.add(piece)", "        pass"),
    "a manifest is in the object store before its tensors": (
        OBJECTS,
        "(manifest.file, MANIFEST)",
        "(MANIFEST, manifest.file)",
    ),
    "a manifest in the object store is removed last": (PIECES, "file: file != manifest)", "file: file == manifest)"),
    "an unfinished version in the object store is one": (
        OBJECTS,
        "for name, of in files.items() if MANIFEST in of), key",
        "for name, of in files.items()), key",
    ),
    "pieces of an object come in another order": (
        PIECES,
        "yield bytes(await waiting.popleft())\n                while",
        "yield bytes(await waiting.pop())\n                while",
    ),
    "the last piece of an object is left out": (PIECES, "while waiting:", "while len(waiting) > 1:"),
    "old versions stay in the object store": (OBJECTS, "self._remove_old_objects(manifest.epoch)", "pass"),
    "objects that may still be rolled out with are removed": (
        OBJECTS,
        "max_staleness // self._config.learner.publish_every + 1",
        "max_staleness // self._config.learner.publish_every",
    ),
    "a later learner's objects are removed": (OBJECTS, "if order_of(name)[0] <= epoch}", "}"),
    "a copy of another run is this one's": (
        COPIES,
        "if name not in self.known and not await",
        "if False and not await",
    ),
    "a damaged copy stays": (COPIES, 'log.warning("%s; it is fetched again", error)\n            return None', "raise"),
    "what was just fetched is removed": (COPIES, "if path != newest)", ")"),
    "a version that cannot be removed ends the learner": (
        OBJECTS,
        "except (WeightsUnavailable, WriteFailed) as error:  # the",
        "except ZeroDivisionError as error:  # the",
    ),
    "a checkpoint counts before its curves are there": (CHECKPOINTS, "self._keep_changed(METRICS, SCORES)", "pass"),
    "a checkpoint without its state is restored": (
        CHECKPOINTS,
        "_checkpoints_in(paths).items() if STATE_FILE in files}",
        "_checkpoints_in(paths).items()}",
    ),
    "a start is restored before its curves": (
        CHECKPOINTS,
        "for path in sorted(missing - counting | ",
        "for path in sorted(missing | ",
    ),
    "a checkpoint whose upload failed stays away": (
        CHECKPOINTS,
        "if resumed is not None and not self._objects.has(resumed.path.name):",
        "if False:",
    ),
    "a damaged checkpoint is not fetched again": (
        CHECKPOINTS,
        "(name != newest or not await asyncio.to_thread(damage_of, target))",
        "True",
    ),
    "a later learner's checkpoints are removed": (CHECKPOINTS, "if _order_of(name)[1] <= epoch and not", "if not"),
    "old checkpoints stay in the object store": (CHECKPOINTS, "self._objects.remove_old(self.epoch)", "pass"),
    "a take-over is not told at once": (
        CHECKPOINTS,
        "        self._objects.keep_history()  # from now",
        "        pass  # from now",
    ),
    "a folder keeps its own marker": (CHECKPOINTS, "run_folder.adopt(self._folder, theirs)", "pass"),
    "another run's checkpoints are restored": (
        CHECKPOINTS,
        "if theirs.run != self._run or not (",
        "if (False and self._run) or not (",
    ),
    "what this learner is writing is removed": (OBJECTS, "order_of(name)[0] < epoch:", "True:"),
    "the epochs in the object store are not known": (
        OBJECTS,
        "*(order_of(name)[0] for name in versions_in(self._objects))",
        "*[0]",
    ),
    "versions to be scored are deleted": (
        ("weights/folder.py", "weights/test_folder.py"),
        " if self._keeps(version)",
        " if False",
    ),
    "what was published again stays": (
        ("weights/folder.py", "weights/test_folder.py"),
        "of_versions = {order_of(name)[1]: name for name in ordered}",
        "of_versions = {order_of(name)[1]: name for name in reversed(ordered)}",
    ),
    "a restored file is not checked": (DIFFERENCE, "            tensors.add(restored)\n", ""),
    "half a difference is enough": (DIFFERENCE, "if len(piece) < place.stop - place.start:", "if False:"),
    "a difference is sent whatever its size": (SERVED, "if file.tell() > WORTH_IT * new.stat().st_size:", "if False:"),
    "every machine has its own difference made": (SERVED, "if made not in self._differences:", "if True:"),
    "what is wrong with a difference ends the download": (
        DOWNLOADS,
        _FALLS_BACK,
        _FALLS_BACK.replace("(WeightsUnavailable, BadTensorFile, WriteFailed)", "ZeroDivisionError"),
    ),
}
