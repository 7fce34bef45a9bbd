"""Functions of the host that this sandbox may call.

    from sandvmm import host
    row = host.lookup(id=3)

Keyword arguments are sent as a JSON object, one positional argument as any JSON value. What the function returns comes
back; what it fails with is raised as HostError. Threads may call at the same time.
"""

import json
import os
import socket
import threading

SOCKET = "/run/sandvmm/host.sock"

__all__ = ["HostError", "host"]


class HostError(Exception):
    """A call that failed.

    kind is "failed" where the function itself did; else "unknown", "arguments", "deadline", "rate", "busy",
    "too_large", or "gone" where the host takes no calls (any more).
    """

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind = kind
        self.message = message


class Host:
    """The host's functions, as attributes."""

    def __init__(self):
        self._local = threading.local()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*args, **kwargs):
            return self.call(name, *args, **kwargs)

        function.__name__ = function.__qualname__ = name
        return function

    def __repr__(self):
        return "<functions of the host>"

    def call(self, name, /, *args, **kwargs):
        """Calls the function of this name."""
        request = {"call": name}
        if len(args) > 1 or (args and kwargs):
            raise TypeError("a function of the host takes keyword arguments or one positional argument")
        if args:
            request["args"] = args[0]
        elif kwargs:
            request["args"] = kwargs
        line = json.dumps(request).encode() + b"\n"
        try:
            answer = self._exchange(line)
        except OSError as error:
            raise HostError("gone", f"the host takes no calls: {error}") from None
        if "error" in answer:
            raise HostError(answer["error"]["kind"], answer["error"]["message"])
        return answer["ok"]

    def _exchange(self, line):
        # One connection for each thread; a forked process must not share that of its parent.
        local = self._local
        if getattr(local, "owner", None) != os.getpid():
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(SOCKET)
            local.stream, local.owner = connection.makefile("rwb"), os.getpid()
            connection.close()
        stream, local.owner = local.stream, None
        stream.write(line)
        stream.flush()
        answer = stream.readline()
        if not answer.endswith(b"\n"):
            raise ConnectionError("the connection was closed")
        answer = json.loads(answer)
        # A call that was broken off, by a KeyboardInterrupt say, leaves a connection that nobody uses again.
        if answer.get("error", {}).get("kind") != "too_large":
            local.owner = os.getpid()
        return answer


host = Host()
