"""Convert the samples of a tar file to Mosaic's shards."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

from streaming import MDSWriter

if __name__ == "__main__":
    source, target = sys.argv[1:]
    with MDSWriter(out=target, columns={"bin": "bytes", "cls": "int"}, size_limit=1 << 25) as writer:
        for path in sorted(Path(source).glob("*.tar")):
            with tarfile.open(path) as tar:
                members = {member.name: member for member in tar}
                for name in [name for name in members if name.endswith(".bin")]:
                    parts = (members[name], members[name.replace(".bin", ".cls")])
                    data, label = (tar.extractfile(part).read() for part in parts)  # type: ignore[union-attr]
                    writer.write({"bin": data, "cls": int(label)})
