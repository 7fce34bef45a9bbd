# A repository for who knows the secret; over HTTPS, whole and shallow, news of it, and one that is not allowed.
set -e
cd /tmp
git clone --quiet "https://me:$TOKEN@api.example/private/git/work.git" private
ls private | wc -l
export GIT_SSL_CAINFO=/tmp/server.pem
git clone --quiet https://allowed.example/git/work.git whole
git -C whole log --format=%s
git -C whole fsck --strict 2>&1 | grep -v '^notice' || true
cat whole/file19 | sha256sum | cut -c 1-16
git clone --quiet --depth 1 http://allowed.example/git/work.git shallow
git -C shallow fetch --quiet
ls shallow | wc -l
if git clone --quiet https://denied.example/git/work.git denied 2> said; then
    echo cloned
else
    grep -c -m 1 "Failed to connect\|Couldn't connect" said
fi
