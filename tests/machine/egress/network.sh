#!/bin/sh
# A network of the test's own, in network and mount namespaces of its own (`unshare --net --mount`): addresses of public
# and other ranges on its loopback, names for them, and servers on all of them.
#
#     network.sh FOLDER COMMAND...
set -e
folder=$1
shift
rm -f "$folder/up"
ip link set lo up
for address in 93.184.216.34/32 93.184.216.35/32 93.184.216.36/32 10.7.7.7/32 169.254.169.254/32 2606:2800:220:1::1/128; do
    ip address add "$address" dev lo
done
cat > "$folder/hosts" <<'HOSTS'
127.0.0.1 localhost
93.184.216.34 allowed.example www.allowed.example a.b.allowed.example shared.example
93.184.216.34 files.example xn--bcher-kva.example
2606:2800:220:1::1 six.example
93.184.216.35 other.example
93.184.216.36 api.example bad.example
10.7.7.7 inside.example
93.184.216.34 mixed.example
10.7.7.7 mixed.example
127.0.0.1 loop.example
169.254.169.254 metadata.example
HOSTS
mount --bind "$folder/hosts" /etc/hosts
# All other names are asked for at the test's own server. Without these files that is so anyway (resolv.conf(5)).
echo 'nameserver 127.0.0.1' > "$folder/resolv.conf"
echo 'hosts: files dns' > "$folder/nsswitch.conf"
for file in resolv.conf nsswitch.conf; do
    if [ -e "/etc/$file" ]; then mount --bind "$folder/$file" "/etc/$file"; fi
done
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=test \
    -addext 'subjectAltName=DNS:allowed.example,DNS:*.allowed.example,DNS:other.example,DNS:six.example,DNS:shared.example,DNS:files.example' \
    -keyout "$folder/server.key" -out "$folder/server.pem" 2> /dev/null
# An authority, and a server that it knows.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=authority \
    -keyout "$folder/ca.key" -out "$folder/ca.pem" 2> /dev/null
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=api -keyout "$folder/api.key" 2> /dev/null |
    openssl x509 -req -CA "$folder/ca.pem" -CAkey "$folder/ca.key" -CAcreateserial -days 30 -out "$folder/api.pem" \
        -extfile /dev/fd/3 2> /dev/null 3<<'NAMES'
subjectAltName=DNS:api.example
NAMES
python3 -I -S "$folder/servers.py" "$folder" &
servers=$!
trap 'kill $servers' EXIT
while [ ! -e "$folder/up" ]; do
    kill -0 $servers
    sleep 0.05
done
cd "$folder"
"$@"
