"""What the servers of the test network have for package managers and Git: packages of Python, one of Debian, or a repository.

    wares.py FOLDER wheels|debian|repository
"""
import hashlib, os, subprocess, sys, zipfile

folder, wanted = sys.argv[1:]


def write(path, text):
    path = os.path.join(folder, path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    return path


def wheel(name, needs=()):
    """A wheel (PEP 427) in an index (PEP 503) whose files are at another host, as with the public one, in one that has them itself, and in
    one whose files are where nothing is allowed."""
    file = f"{name}-1.0-py3-none-any.whl"
    path = write(f"files/wheels/{file}", "")
    info = f"{name}-1.0.dist-info"
    needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"word = '{name}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    with open(path, "rb") as content:
        digest = hashlib.sha256(content.read()).hexdigest()
    for index, files in (("simple", "https://files.example/files"), ("near", "../.."), ("far", "https://denied.example/files")):
        link = f"{files}/wheels/{file}#sha256={digest}"
        write(f"files/{index}/{name}/index.html", f"<!DOCTYPE html><a href='{link}'>{file}</a>\n")


def run(*command):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)


def wheels():
    wheel("first", ["second"])
    wheel("second")
    wheel("third")


def debian():
    """A flat repository of Debian packages (sources.list(5))."""
    control = "Package: greeting\nVersion: 1.0\nArchitecture: all\nMaintainer: test <test@example>\nDescription: a greeting\n"
    write("greeting/DEBIAN/control", control)
    write("greeting/usr/share/greeting", "hello from a package\n")
    os.makedirs(os.path.join(folder, "files/debian"), exist_ok=True)
    run("dpkg-deb", "--root-owner-group", "--build", "greeting", "files/debian/greeting.deb")
    with open(os.path.join(folder, "files/debian/greeting.deb"), "rb") as package:
        content = package.read()
        digest = hashlib.sha256(content).hexdigest()
        write("files/debian/Packages", f"{control}Filename: ./greeting.deb\nSize: {len(content)}\nSHA256: {digest}\n")


def repository():
    for commit in range(20):
        path = write(f"work/file{commit}", f"content {commit}\n" * 1000)
    run("git", "init", "--quiet", "work")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example"]
    run("git", "-C", "work", "add", ".")
    run("git", "-C", "work", *identity, "commit", "--quiet", "--message", "the first")
    run("git", "clone", "--quiet", "--bare", "work", "git/work.git")


{"wheels": wheels, "debian": debian, "repository": repository}[wanted]()
