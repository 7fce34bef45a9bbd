# Three packages from an index whose files are at another host; one from an index for who knows the secret; and one whose files are where
# nothing was allowed.
set -e
install="pip install --quiet --disable-pip-version-check --no-cache-dir --retries 0"
# Of the two variables that the sandbox sets, pip follows the one of requests.
cat "$REQUESTS_CA_BUNDLE" /tmp/server.pem > /tmp/both.pem
export REQUESTS_CA_BUNDLE=/tmp/both.pem
$install --target /tmp/packages --index-url https://allowed.example/files/simple/ first third
PYTHONPATH=/tmp/packages python3 -c 'import first, second, third; print(first.word, second.word, third.word)'
$install --target /tmp/private --index-url "https://me:$TOKEN@api.example/private/files/near/" third
PYTHONPATH=/tmp/private python3 -c 'import third; print(third.word)'
if $install --target /tmp/denied --index-url https://allowed.example/files/far/ third 2> /tmp/said; then
    echo installed
else
    grep -c -m 1 'Connection refused' /tmp/said
fi
