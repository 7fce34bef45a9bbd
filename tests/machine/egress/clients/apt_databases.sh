# A package of Debian's from a repository over HTTP, whose requests are many on one connection.
set -e
mkdir -p /etc/apt/apt.conf.d /etc/apt/preferences.d /etc/apt/trusted.gpg.d
echo 'deb [trusted=yes] http://allowed.example/files/debian ./' > /etc/apt/sources.list
apt-get update --quiet=2
apt-get install --quiet=2 greeting > /dev/null 2>&1
cat /usr/share/greeting
echo 'deb [trusted=yes] http://denied.example/files/debian ./' > /etc/apt/sources.list
apt-get update --quiet=2 -o Acquire::Retries=0 2>&1 | grep -c -m 1 refused

# The protocol of Redis.
redis="redis-cli -h allowed.example"
$redis PING
$redis SET word hello
$redis GET word
redis-cli -h denied.example PING 2>&1 | grep -c refused

# The protocol of PostgreSQL, whose client asks for encryption first.
query="psql --no-psqlrc --tuples-only --no-align --username guest --dbname ware --port 5433"
$query --host allowed.example --command 'select 1; select 2' --command 'select 3'
$query --host denied.example --command 'select 4' 2>&1 | grep -c refused
