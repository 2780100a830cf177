"""Shared by scripts that compare logits: runs the binary in a folder."""

import json
import subprocess
import sys


class Program:
    def __init__(self, binary, folder):
        self.binary, self.folder = binary, folder

    def __call__(self, *words):
        """Standard output of `flatout words ...`; ends the script if it fails."""
        done = subprocess.run([self.binary, *map(str, words)], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"flatout {' '.join(map(str, words))}\n{done.stderr}")
        return done.stdout

    def logits(self, model, ids):
        """The logits of a run or a folder for rows of tokens, in f32 on the CPU."""
        from safetensors.torch import load_file

        (self.folder / "ids.json").write_text(json.dumps(ids.tolist()))
        self("logits", model, "backend=cpu", "precision=fp32", "--ids", "ids.json", "--out", "logits.safetensors")
        return load_file(self.folder / "logits.safetensors")["logits"]
