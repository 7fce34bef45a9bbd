# curl over HTTP/1.1 and HTTP/2, over IPv4 and IPv6, with what it says to the server that asks for consent to a body; and refused.
curl="curl --silent --show-error --max-time 60"
$curl --output /dev/null --write-out '%{http_code} %{http_version}\n' -H "Authorization: Bearer $TOKEN" https://api.example/show
$curl --http2 --write-out '%{http_code} %{http_version}\n' -H "Authorization: Bearer $TOKEN" https://api.example:8443/show
export CURL_CA_BUNDLE=/tmp/server.pem
$curl https://allowed.example/
$curl -4 http://allowed.example/
$curl -6 https://allowed.example/
$curl --location http://allowed.example/one http://allowed.example/two
head -c 3000000 /dev/zero | $curl --data-binary @- -H 'Expect: 100-continue' https://allowed.example/ | wc -c
$curl --http2 --write-out '%{http_version}\n' https://allowed.example:8443/
# The name with a dot at its end is the name: curl leaves the dot out of its hello.
$curl https://allowed.example./
for url in https://denied.example/ http://169.254.169.254/ http://[::ffff:169.254.169.254]/ http://2852039166/ http://127.1:81/; do
    $curl $url 2> /dev/null
    echo $?
done
$curl --location --output /dev/null http://allowed.example/redirect 2> /dev/null
echo $?
