#!/bin/sh
# Makes the certificates of the test: `sh make.sh` in this directory. They are for it alone, and valid for a century.
set -eu
names="subjectAltName=DNS:api.test,IP:0.0.0.0,IP:127.0.0.1"
for name in ca other own server client; do
    openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:prime256v1 -out $name.key
done
for name in ca other own; do
    openssl req -x509 -new -key $name.key -out $name.pem -days 36500 -subj /CN=$name \
        -addext basicConstraints=critical,CA:TRUE -addext "$names"
done
signed() {
    openssl req -new -key "$1.key" -subj "/CN=$1" |
        openssl x509 -req -CA ca.pem -CAkey ca.key -days 36500 -out "$1.pem" -extfile extensions
}
printf '%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" > extensions
signed server
printf 'extendedKeyUsage=clientAuth\n' > extensions
signed client
rm extensions ca.key other.key
