"""nginx, which serves a folder by ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import free_port, listens, program, running

_CONFIG = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        {rules}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[str]:
    """The address under which the files in `root` are served; /private/ is refused, /no-ranges/ comes whole."""
    rules = f"root {root}; location /private/ {{ return 403; }} location /no-ranges/ {{ max_ranges 0; }}"
    with ruled(folder, rules) as address:
        yield address


@contextmanager
def ruled(folder: Path, rules: str) -> Iterator[str]:
    """The address of a server that follows these rules of nginx's."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    config = folder / "nginx.conf"
    config.write_text(_CONFIG.format(folder=folder, port=port, rules=rules))
    command = [program("nginx", "nginx"), "-c", str(config), "-p", str(folder), "-e", "stderr"]
    with running(command, lambda: listens(port), folder / "nginx.out"):
        yield f"http://127.0.0.1:{port}"
