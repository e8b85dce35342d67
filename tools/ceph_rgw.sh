#!/usr/bin/env bash
# A real object store on this machine: Ceph with one monitor, one store in memory and RGW, which speaks S3.
#
#   ceph_rgw.sh start DIR PORT     start it, wait until it answers, leave it running
#   ceph_rgw.sh run   DIR PORT     the same in the foreground: it ends with this script, however that ends
#   ceph_rgw.sh stop  DIR          end what `start` left running
#
# Keys: testkey / testsecret may do everything with what it owns; otherkey / othersecret is somebody else.
# CEPH_STORE=bluestore keeps objects on disk. Debian: radosgw ceph-mon ceph-osd ceph-common. No root needed.
set -euo pipefail

fail() { echo "ceph_rgw.sh: $*" >&2; exit 1; }

usage() { sed -n '4,6s/^# *//p' "$0" >&2; exit 2; }

# Outside the range that the kernel gives to outgoing connections, so that none takes it before the daemon does.
free_port() {
  local port
  for _ in $(seq 100); do
    port=$((10000 + (RANDOM * 32768 + RANDOM) % 20000))
    if ! (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then echo "$port"; return; fi
  done
  fail "no free port for the monitor"
}

configure() {
  cat >"$DIR/ceph.conf" <<CONF
[global]
fsid = $FSID
mon host = v1:127.0.0.1:$MONITOR
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr2 = false
auth cluster required = none
auth service required = none
auth client required = none
run dir = $DIR/run
log file = $DIR/log/\$name.log
admin socket =
mon data = $DIR/mon
# Every pool and every change of a map waits this long; the default is a second.
paxos propose interval = 0.05
paxos min wait = 0.02
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd data = $DIR/osd
osd objectstore = ${CEPH_STORE:-memstore}
memstore device bytes = ${CEPH_MEMORY:-4G}
bluestore block size = 8G
osd max object name len = 2048
# The monitor's map has our one place for it; an update by the daemon itself races with ours.
osd class update on start = false
osd crush update on start = false
osd op num shards = 1
osd op num threads per shard = 2
[client.rgw]
# Without tcp_nodelay a small answer waits for the client's delayed acknowledgement of its head: 40 ms.
rgw frontends = beast endpoint=127.0.0.1:$PORT tcp_nodelay=1
rgw thread pool size = 64
rgw enable usage log = false
rgw dns name = localhost
CONF
}

# daemon NAME COMMAND...: in the background, its pid in DIR/NAME.pid. In the foreground's case it dies with us.
daemon() {
  local name=$1; shift
  if [ "$VERB" = run ]; then
    setpriv --pdeathsig KILL "$@" >"$DIR/log/$name.out" 2>&1 </dev/null &
  else
    setsid "$@" >"$DIR/log/$name.out" 2>&1 </dev/null &
  fi
  echo $! >"$DIR/$name.pid"
}

alive() { kill -0 "$(cat "$DIR/$1.pid")" 2>/dev/null || fail "$1 ended: $(tail -n 3 "$DIR/log/$1.out")"; }

# wait_for NAME COMMAND...: until the command succeeds; not longer than a minute, nor than the daemon lives.
wait_for() {
  local name=$1 end=$((SECONDS + 60)); shift
  until "$@" >/dev/null 2>&1; do
    alive "$name"
    [ $SECONDS -lt $end ] || fail "$name did not answer in 60 s; its logs are in $DIR/log"
    sleep 0.1
  done
}

osd_is_up() { timeout 20 ceph "${CONF[@]}" --connect-timeout 5 osd stat | grep -q ' 1 up'; }

answers() { (: <"/dev/tcp/127.0.0.1/$PORT"); }

new_user() {
  timeout 60 radosgw-admin "${CONF[@]}" user create --uid "$1" --display-name "$1" --access-key "$2" --secret-key "$3" \
    >"$DIR/log/user-$1.json" 2>"$DIR/log/user-$1.err" || fail "no user $1: $(tail -n 3 "$DIR/log/user-$1.err")"
}

start() {
  monmaptool --create --clobber --fsid "$FSID" --addv a "[v1:127.0.0.1:$MONITOR]" "$DIR/monmap" >/dev/null
  ceph-mon "${CONF[@]}" -i a --mkfs --monmap "$DIR/monmap" >"$DIR/log/mkfs-mon.out" 2>&1
  daemon mon ceph-mon "${CONF[@]}" -i a -f
  wait_for mon timeout 20 ceph "${CONF[@]}" --connect-timeout 5 osd new "$OSD"
  ceph-osd "${CONF[@]}" -i 0 --mkfs --osd-uuid "$OSD" >"$DIR/log/mkfs-osd.out" 2>&1
  daemon osd ceph-osd "${CONF[@]}" -i 0 -f
  timeout 20 ceph "${CONF[@]}" osd crush add osd.0 1 root=default host=here >"$DIR/log/crush.out" 2>&1
  wait_for osd osd_is_up
  new_user test testkey testsecret
  daemon rgw radosgw "${CONF[@]}" -n client.rgw -f
  new_user other otherkey othersecret
  wait_for rgw answers
}

stop() {
  local name pid
  for name in rgw osd mon; do
    [ -f "$DIR/$name.pid" ] || continue
    pid=$(cat "$DIR/$name.pid")
    # A pid may be somebody else's by now: ours has our folder in its command line.
    if tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "$DIR/ceph.conf"; then
      kill -KILL "$pid" 2>/dev/null || true
    fi
    rm -f "$DIR/$name.pid"
  done
  # Ours by birth, if not yet by name; waited for, so that they leave no entry behind.
  local children
  mapfile -t children < <(jobs -p)
  [ ${#children[@]} = 0 ] || kill -KILL "${children[@]}" 2>/dev/null || true
  wait
}

VERB=${1:-}
[ $# -ge 2 ] || usage
case $VERB in
  stop)
    DIR=$(realpath "$2")
    stop
    ;;
  start | run)
    [ $# -eq 3 ] || usage
    for tool in ceph ceph-mon ceph-osd monmaptool radosgw radosgw-admin; do
      command -v "$tool" >/dev/null || fail "no $tool: apt-get install radosgw ceph-mon ceph-osd ceph-common"
    done
    mkdir -p "$2"
    DIR=$(realpath "$2") PORT=$3
    [ -z "$(ls -A "$DIR")" ] || fail "$DIR is not empty"
    mkdir "$DIR"/{mon,osd,log,run}
    MONITOR=$(free_port) FSID=$(cat /proc/sys/kernel/random/uuid) OSD=$(cat /proc/sys/kernel/random/uuid)
    CONF=(-c "$DIR/ceph.conf")
    configure
    trap 'exit 1' TERM INT
    trap stop EXIT
    start
    echo up
    if [ "$VERB" = start ]; then trap - EXIT; exit; fi
    trap 'exit 0' TERM INT
    wait -n || true
    fail "a daemon ended; its logs are in $DIR/log"
    ;;
  *) usage ;;
esac
