"""Uses the parts of the standard library that lean on the operating system."""
import asyncio
import json
import multiprocessing
import os
import socket
import sqlite3
import subprocess
import tempfile
import threading


def square(number):
    return number * number


def databases():
    with tempfile.TemporaryDirectory() as folder:
        connection = sqlite3.connect(os.path.join(folder, "file.db"))
        connection.execute("pragma journal_mode=wal")
        with connection:
            connection.execute("create table numbers (n integer)")
            connection.executemany("insert into numbers values (?)", ((n,) for n in range(100)))
        print("sqlite3", connection.execute("select sum(n) from numbers").fetchone()[0])
        connection.close()


def threads():
    lock, total = threading.Lock(), [0]

    def add():
        for _ in range(1000):
            with lock:
                total[0] += 1

    workers = [threading.Thread(target=add) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("threads", total[0])


def sockets():
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        peer, _ = server.accept()
        peer.sendall(peer.recv(100).upper())
        peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    client = socket.create_connection(server.getsockname())
    client.sendall(b"ping")
    print("sockets", client.recv(100))
    thread.join()


async def tasks():
    async def one(number):
        await asyncio.sleep(0.01 * (3 - number))
        return number

    print("asyncio", await asyncio.gather(*(one(number) for number in range(3))))


def main():
    databases()
    text = json.dumps({"ключ": [1, 2.5, None, True]}, ensure_ascii=False)
    print("json", "ok" if json.loads(text) == {"ключ": [1, 2.5, None, True]} else text)
    done = subprocess.run(["tr", "a-z", "A-Z"], input="hello", capture_output=True, text=True, check=True)
    print("subprocess", done.stdout)
    threads()
    with multiprocessing.Pool(2) as pool:
        print("multiprocessing", pool.map(square, range(4)))
    sockets()
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x" * 100_000)
        file.flush()
        print("tempfile", os.path.getsize(file.name) == 100_000)
    asyncio.run(tasks())
    print("done")


if __name__ == "__main__":
    main()
