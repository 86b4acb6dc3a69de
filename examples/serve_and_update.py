"""Serve a model and replace its weights while it serves: `python examples/serve_and_update.py MODEL [PORT]`.

Needs `pip install 'rm-optimizer[serve]'`.
"""

import subprocess
import sys

import torch

from rm_optimizer import BradleyTerryRM, RewardClient, create_rm_publisher


def main() -> None:
    """Print one reward with its version, before and after new weights."""
    folder, port = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "8000"
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(["rm-opt", "serve", folder, "--port", port])
    try:
        client = RewardClient(url, timeout_seconds=300)  # waits until the model is loaded
        print(client.version, client.score(["What is 2 + 2?"], ["It is 4."]).item())

        model = BradleyTerryRM.from_pretrained(folder)
        with torch.no_grad():  # a training step would stand here
            model.reward_head.weight.mul_(2.0)
        with create_rm_publisher(url) as publisher:
            publisher.publish(model, version="doubled")  # returns once they serve
        print(client.version, client.score(["What is 2 + 2?"], ["It is 4."]).item())
        client.close()
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
