"""A real Slurm cluster on one machine: munged, slurmctld and a slurmd for every node.

Each node has Linux namespaces of its own (network, host name, mounts, processes), wired by a virtual Ethernet
pair to a bridge. Bridge, controller and nodes all live inside the head's namespaces, which have no name
outside: two clusters never collide, and when the head's first process dies the kernel ends every process of
the cluster and takes back its networks.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from lightswitch.regular_files import make_tree, remove_tree

PROGRAMS = ("ip", "mount", "munged", "nsenter", "sbatch", "setpriv", "slurmctld", "slurmd", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# a process namespace for each: to kill its first process is a power failure
NEW_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SUBNET = "10.77.0"

# SlurmdParameters: a node may have more processors than the machine; cred_expire: a requeued job waits for it,
# and a busy machine takes more than 5 s to launch a step. A job whose launch takes longer than MessageTimeout, or
# whose end is told later than BatchStartTimeout, Slurm runs a second time; one whose node is silent for SlurmdTimeout,
# too. KillWait is what a run has to end; MinJobAge: tests ask for jobs that have ended long ago
SLURM_CONF = """\
ClusterName=lightswitch
SlurmctldHost=head({subnet}.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=15
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
MailProg=/bin/true
KillWait=60
MinJobAge=7200
SlurmdTimeout=30
MessageTimeout=30
BatchStartTimeout=60
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmdParameters=config_overrides
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldLogFile={root}/head.log
SlurmdLogFile={root}/%n.log
NodeName=node[1-{nodes}] NodeAddr={subnet}.[1-{nodes}] CPUs={cpus} Gres=gpu:{gpus}
NodeName=node{large} NodeAddr={subnet}.{large} CPUs={cpus} Gres=gpu:{gpus_of_large} Feature=large
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=node[1-{nodes}] State=UP PriorityTier=2
PartitionName=large Nodes=ALL State=UP PriorityTier=1
"""

HEAD = """\
hostname head
mount --bind hosts /etc/hosts
mount --bind nsswitch.conf /etc/nsswitch.conf
ip link set lo up
# an address of its own: else it takes the lowest of its ports', and hosts lose the head when a card is plugged in
ip link add bridge address 02:00:00:00:00:fe type bridge
ip addr add {subnet}.254/24 dev bridge
ip link set bridge up
munged --force --key-file=munge.key --socket=munge.socket --pid-file=munge.pid --log-file=munge.log \\
    --seed-file=munge.seed
exec slurmctld -D
"""

# the network card comes from outside: the line that `read` waits for says that it is there
NODE = """\
read -r _
hostname node{node}
ip link set lo up
ip addr add {subnet}.{node}/24 dev eth0
ip link set eth0 up
exec slurmd -D -N node{node}
"""


def why_not(programs: Sequence[str] = PROGRAMS) -> str | None:
    """Why no machines with these programs can come up here, or None."""
    if os.geteuid() != 0:
        return "machines of namespaces need root"
    if missing := [program for program in programs if shutil.which(program, path=PATH) is None]:
        return f"not installed: {', '.join(missing)}; type bash .ci/run, which installs them"
    attempt = subprocess.run([*NEW_NAMESPACES, "true"], capture_output=True, text=True)
    return f"no new namespaces: {attempt.stderr.strip()}" if attempt.returncode else None


class Cluster:
    """A running cluster: node1, node2, … Its GPUs are fake, but CUDA_VISIBLE_DEVICES is set for them.

    After the nodes of the default partition comes one with twice as many GPUs, in the partition `large` alone, which
    has the others as well.
    """

    head_script, node_script = HEAD, NODE  # what each host runs

    def __init__(self, nodes: int = 4, cpus_per_node: int = 8, gpus_per_node: int = 2) -> None:
        self.nodes = range(1, nodes + 2)  # the large one is the last
        self.cpus_per_node = cpus_per_node
        self.gpus_per_node = gpus_per_node
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.first_pids: dict[str, int] = {}  # the first process inside each host's namespaces
        self._plugged = 0
        self._cards: dict[str, str] = {}  # of each host, its end in the head's bridge

    def __enter__(self) -> Cluster:
        self.root = make_tree(Path(f"/tmp/slurm-{secrets.token_hex(4)}"))  # a socket's path has at most 107 bytes
        try:
            self._write_files()
            self._start_head()
            for node in self.nodes:
                self.boot(node)
            self._until(self._is_up, "the nodes did not become idle")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends every process of the cluster: all of them are below the head's first one."""
        if "head" in self.processes:
            self.processes["head"].kill()
        for process in self.processes.values():
            process.communicate()
        remove_tree(self.root)

    def boot(self, node: int) -> None:
        name = f"node{node}"
        inside_head = ["nsenter", f"--target={self.first_pids['head']}", "--all", f"--wdns={self.root}"]
        process = self._start(name, [*inside_head, *NEW_NAMESPACES], self.node_script.format(node=node, subnet=SUBNET))
        self.first_pids[name] = _descendant(process.pid, generations=2)
        self._plug_card(name)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    def crash(self, node: int) -> None:
        """A power failure: every process of the node is gone at once, its network too."""
        process = self.processes.pop(f"node{node}")
        os.kill(self.first_pids.pop(f"node{node}"), signal.SIGKILL)
        process.communicate()

    def cut(self, node: int) -> None:
        """The node lives on, and nothing that is sent to it or by it arrives."""
        self._ip_link("set", self._cards[f"node{node}"], "nomaster")

    def mend(self, node: int) -> None:
        self._ip_link("set", self._cards[f"node{node}"], "master", "bridge")

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command on the head, as one who is logged in there does."""
        inside = ["nsenter", f"--target={self.first_pids['head']}", "--net", "--uts", "--mount"]
        return subprocess.run(
            [*inside, f"--wdns={cwd or Path.cwd()}", *command],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def idle_nodes(self) -> int:
        of_each_partition = self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").stdout.split()
        return len(set(of_each_partition))

    def _is_up(self) -> bool:
        return self.idle_nodes() == len(self.nodes)

    def _head_answers(self) -> bool:
        return self.run("scontrol", "ping").returncode == 0

    def _write_files(self) -> None:
        conf = SLURM_CONF.format(
            subnet=SUBNET,
            root=self.root,
            nodes=len(self.nodes) - 1,
            large=self.nodes[-1],
            cpus=self.cpus_per_node,
            gpus=self.gpus_per_node,
            gpus_of_large=2 * self.gpus_per_node,
        )
        (self.root / "slurm.conf").write_text(conf)
        gpus = [self.root / f"nvidia{index}" for index in range(2 * self.gpus_per_node)]
        for gpu in gpus:
            os.mknod(gpu, stat.S_IFCHR, os.makedev(1, 3))  # /dev/null
        names = {f"node[1-{len(self.nodes) - 1}]": gpus[: self.gpus_per_node], f"node{self.nodes[-1]}": gpus}
        gres = [f"NodeName={name} Name=gpu File={gpu}\n" for name, there in names.items() for gpu in there]
        (self.root / "gres.conf").write_text("".join(gres))
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        hosts = ["127.0.0.1 localhost", f"{SUBNET}.254 head", *(f"{SUBNET}.{node} node{node}" for node in self.nodes)]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")
        # no name server can be reached from inside, and asking one costs 10 seconds
        (self.root / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")

    def _start_head(self) -> None:
        # the head dies with this process, however that ends
        die_with_me = ["setpriv", "--pdeathsig", "KILL"]
        process = self._start("head", [*die_with_me, *NEW_NAMESPACES], self.head_script.format(subnet=SUBNET))
        self.first_pids["head"] = _descendant(process.pid, generations=1)
        self._until(self._head_answers, "slurmctld does not answer")

    def _start(self, name: str, enter: list[str], script: str) -> subprocess.Popen[str]:
        with (self.root / f"{name}.out").open("a") as output:
            self.processes[name] = subprocess.Popen(
                [*enter, "sh", "-euc", script],
                cwd=self.root,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
            )
        return self.processes[name]

    def _plug_card(self, name: str) -> None:
        """Wires eth0 of a new node to the head's bridge."""
        self._plugged += 1  # a crashed node's card may linger
        card = self._cards[name] = f"veth{self._plugged}"
        self._ip_link("add", card, "type", "veth", "peer", "name", "eth0", "netns", str(self.first_pids[name]))
        self._ip_link("set", card, "master", "bridge", "up")

    def _ip_link(self, *arguments: str) -> None:
        in_head_network = ["nsenter", f"--net=/proc/{self.first_pids['head']}/ns/net", "ip", "link"]
        subprocess.run([*in_head_network, *arguments], check=True)

    def _environment(self) -> dict[str, str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**outside, "PATH": f"{outside['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(self.root / "slurm.conf")}

    def _until(self, ready: Callable[[], bool], complaint: str, timeout_seconds: float = 300) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not ready():
            if time.monotonic() > deadline:
                said = [f"{path.stem}: {path.read_text()[-1000:]}" for path in sorted(self.root.glob("*.out"))]
                raise TimeoutError("\n".join([f"{complaint} in {timeout_seconds} s", *said]))
            time.sleep(0.1)


def _descendant(pid: int, generations: int) -> int:
    """The only child of the only child … of a process, as soon as it is there."""
    process = psutil.Process(pid)
    deadline = time.monotonic() + 300
    for _ in range(generations):
        while not (children := process.children()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {process.pid} ({process.status()}) started none in its namespaces")
            time.sleep(0.01)
        process = children[0]
    return process.pid
