"""Planted bugs in how weights travel: `mutants.py` plants them too."""

from __future__ import annotations

_TESTS = "test_differences.py"
DIFFERENCE, DOWNLOADS = ("weights/difference.py", _TESTS), ("weights/downloads.py", "weights")
SERVED = ("weights/http.py", _TESTS)
_FALLS_BACK = "except (WeightsUnavailable, BadTensorFile) as error:\n            log.info"

WEIGHTS = {
    "a lost download begins again": (DOWNLOADS, "began = into.tell()", "began = into.seek(0)"),
    "a download is not checked": (DOWNLOADS, "        tensors.add(piece)", "        pass"),
    "versions to be scored are deleted": (
        ("weights/folder.py", "weights/test_folder.py"),
        "if not self._keeps(version):",
        "if True:",
    ),
    "a restored file is not checked": (DIFFERENCE, "            tensors.add(restored)\n", ""),
    "half a difference is enough": (DIFFERENCE, "if len(piece) < place.stop - place.start:", "if False:"),
    "a difference is sent whatever its size": (
        SERVED,
        "if file.tell() > WORTH_IT * new.stat().st_size:",
        "if False:",
    ),
    "every machine has its own difference made": (SERVED, "if made not in self._differences:", "if True:"),
    "what is wrong with a difference ends the download": (
        DOWNLOADS,
        _FALLS_BACK,
        _FALLS_BACK.replace("(WeightsUnavailable, BadTensorFile)", "ZeroDivisionError"),
    ),
}
