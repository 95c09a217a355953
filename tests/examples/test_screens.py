"""Pictures of terminals in the documents: what docs/screens.py draws."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pyte

ROOT = Path(__file__).resolve().parents[2]


def test_a_picture_has_the_texts_of_a_terminal_and_is_xml() -> None:
    spec = importlib.util.spec_from_file_location("screens", ROOT / "docs" / "screens.py")
    assert spec is not None and spec.loader is not None
    screens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screens)
    screen = pyte.Screen(40, 5)
    pyte.ByteStream(screen).feed("\x1b[36m[0]\x1b[0m a < b & █\r\n\r\nend".encode())
    texts = ElementTree.fromstring(screens.picture(screen)).iter("{http://www.w3.org/2000/svg}text")
    assert ["".join(text.itertext()) for text in texts] == ["[0] a < b & █", "end"]
