"""Draws docs/screens/live.svg and card.svg: what a terminal shows of a real job of two ranks, one with a slow loader.

    python docs/screens.py [FOLDER]

Needs Python 3.11, and pyte and tqdm as in requirements-dev.txt. The job's timeline comes into FOLDER, too, if one is
given; trace.png shows some steps of it in Chrome's viewer.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import termios
from html import escape
from itertools import groupby
from pathlib import Path

import pyte
from pyte.screens import Char

SCREENS = Path(__file__).resolve().parent / "screens"
COLUMNS, ROWS = 130, 12
LIVE_FROM = "epoch 1:  4"
FONT_PX, CHAR_PX, ROW_PX, EDGE_PX = 14, 8.43, 19, 12
INK, PAPER = "#d8dee9", "#1e2430"
COLOURS = {"cyan": "#88c0d0", "green": "#a3be8c", "brown": "#ebcb8b", "magenta": "#b48ead", "blue": "#81a1c1"}

TRAIN = """
import time
import torch
from tqdm import tqdm
import horo.torch as hvd

class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, index):
        time.sleep(0.005 if hvd.rank() == 1 else 0)      # a slow disk
        return torch.randn(256), torch.tensor(index % 10)

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
model = hvd.distribute(model)
optimizer = torch.optim.AdamW(model.parameters())
loader = hvd.shard(torch.utils.data.DataLoader(Pictures(), batch_size=8))
for epoch in range(2):
    for x, y in tqdm(loader, desc=f"epoch {epoch}", ncols=60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        time.sleep(0.03)                                 # a larger model
        optimizer.step()
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")
"""


def main(folder: str) -> None:
    script = Path(folder) / "train.py"
    script.write_text(TRAIN, encoding="utf-8")
    words = ["hororun", "-np", "2", "--output", "rank0", "--live", "--timeline-merge", "all.json", "train.py"]
    screen = pyte.Screen(COLUMNS, ROWS)
    screen.draw("$ " + " ".join(words))
    screen.set_mode(pyte.modes.LNM)
    screen.linefeed()
    stream, drawn = pyte.ByteStream(screen), False
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LC_ALL": "C.UTF-8"}
    command = [sys.executable, "-m", "horo.runner", *words[1:]]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=folder, env=environment) as job:
        os.close(theirs)
        while True:
            try:
                stream.feed(os.read(ours, 65536))
            except OSError:  # the job has ended
                break
            if not drawn and any(LIVE_FROM in row for row in screen.display):
                (SCREENS / "live.svg").write_text(picture(screen), encoding="utf-8")
                drawn = True
    os.close(ours)
    if job.returncode or not drawn:
        sys.exit(f"screens.py: the job ended with {job.returncode}:\n" + "\n".join(screen.display))
    (SCREENS / "card.svg").write_text(picture(screen), encoding="utf-8")


def picture(screen: pyte.Screen) -> str:
    """The rows of a terminal, as an SVG of text."""
    last = max((y for y, row in enumerate(screen.display) if row.strip()), default=0)
    width, height = round(COLUMNS * CHAR_PX + 2 * EDGE_PX), (last + 1) * ROW_PX + 2 * EDGE_PX
    rows = [row_of(screen, y) for y in range(last + 1)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
            f'<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT_PX}" fill="{INK}">',
            *filter(None, rows),
            "</g></svg>\n",
        ]
    )


def row_of(screen: pyte.Screen, y: int) -> str:
    """A row, in pieces of one colour."""
    end = len(screen.display[y].rstrip())
    cells: list[Char] = [screen.buffer[y][x] for x in range(end)]
    pieces = []
    for colour, run in groupby(cells, key=lambda cell: cell.fg):
        text = escape("".join(cell.data for cell in run))
        ink = COLOURS.get(colour)
        pieces.append(text if ink is None else f'<tspan fill="{ink}">{text}</tspan>')
    top = EDGE_PX + y * ROW_PX + FONT_PX
    return f'<text x="{EDGE_PX}" y="{top}" xml:space="preserve">{"".join(pieces)}</text>' if pieces else ""


if __name__ == "__main__":
    SCREENS.mkdir(exist_ok=True)
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as made:
            main(made)
