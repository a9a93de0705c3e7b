"""`by_hand.py [s3] [azure] [postgres] [redis] [nats] [web FOLDER]`: servers of the tests, until Ctrl-C."""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from azurite import azurite
from ceph import radosgw
from nats_server import nats_server
from nginx import nginx
from postgres import postgres
from redis_server import redis_server

_END = {signal.SIGINT, signal.SIGTERM}


def main(names: list[str]) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="feedline-services-")))
        while names:
            name = names.pop(0)
            if name == "s3":
                server = stack.enter_context(radosgw(folder / "ceph"))
                print(f"S3 {server.endpoint} bucket {server.bucket()}")
                print(f"export AWS_ENDPOINT_URL={server.endpoint} AWS_ALLOW_HTTP=true AWS_REGION=us-east-1")
                keys = f"AWS_ACCESS_KEY_ID={server.access_key_id} AWS_SECRET_ACCESS_KEY={server.secret_access_key}"
                print(f"export {keys}")
            elif name == "azure":
                print(f"Azure {stack.enter_context(azurite(folder)).options}")
            elif name == "postgres":
                print(f"PostgreSQL {stack.enter_context(postgres())}")
            elif name == "redis":
                print(f"Redis {stack.enter_context(redis_server(folder))}")
            elif name == "nats":
                print(f"NATS {stack.enter_context(nats_server(folder))}")
            elif name == "web" and names:
                print(f"web {stack.enter_context(nginx(folder / 'nginx', Path(names.pop(0)).absolute()))}")
            else:
                sys.exit(__doc__)
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _END)  # not before: the servers would inherit it
        signal.sigwait(_END)


if __name__ == "__main__":
    main(sys.argv[1:])
