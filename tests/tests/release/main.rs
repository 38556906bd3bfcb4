//! The story of a release, from the registry to the node: pushed, verified, installed and used by the commands of
//! README.md and docs/install.md, uninstalled, and installed without Helm.
//!
//! `cargo xtask test --level release` builds the tools and the node. The registry listens on loopback, where containerd,
//! crane, cosign and Helm use HTTP. An upgrade has no story here: before the first tag there is no release to upgrade
//! from.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::{
    env,
    fs::{self, File},
    net::{TcpListener, TcpStream},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::Instant,
};

use mirror_tests::{AGENT, Cluster, Comparison, KubePod, PATIENCE, SOON, check, eventually, pod_object};
use serde_json::json;

const VERSION: &str = env!("CARGO_PKG_VERSION");
const README: &str = include_str!("../../../README.md");
const INSTALL: &str = include_str!("../../../docs/install.md");
/// The registry and the page of a release, as the documents name them.
const REGISTRY: &str = "ghcr.io/podmirror";
const PAGE: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/releases/download/v", env!("CARGO_PKG_VERSION"));
/// The timeout for commands of the documents, in seconds: Helm waits for 5 minutes.
const LONGEST: &str = "360";

/// A program of `cargo xtask test`, by the variable with its path.
fn tool(variable: &str) -> Command {
    Command::new(env::var_os(variable).unwrap())
}

/// The output of a program that must exit with 0.
#[track_caller]
fn succeeds(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A registry on loopback.
struct Registry {
    server: Child,
    address: String,
}

impl Registry {
    #[track_caller]
    fn start(files: &Path) -> Self {
        // The kernel chooses a free port.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        drop(listener);
        // JSON is YAML too.
        let config = json!({
            "version": 0.1,
            "storage": { "filesystem": { "rootdirectory": files.join("registry") } },
            "http": { "addr": address },
        });
        let path = files.join("registry.yaml");
        fs::write(&path, config.to_string()).unwrap();
        let log = File::create(files.join("registry.log")).unwrap();
        let mut server = tool("MIRROR_REGISTRY");
        server.arg("serve").arg(path).env("OTEL_TRACES_EXPORTER", "none");
        let server = server.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        let registry = Self { server, address };
        eventually(SOON, || TcpStream::connect(&registry.address).map(drop).map_err(|why| why.to_string()));
        registry
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // Both fail only if the server has ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A pair of keys of cosign, without a password.
struct Keys(PathBuf);

impl Keys {
    #[track_caller]
    fn make(files: &Path, name: &str) -> Self {
        let prefix = files.join(name);
        let mut make = tool("MIRROR_COSIGN");
        make.args(["generate-key-pair", "--output-key-prefix"]).arg(&prefix).env("COSIGN_PASSWORD", "");
        succeeds(&mut make);
        Self(prefix)
    }

    fn private(&self) -> PathBuf {
        self.0.with_extension("key")
    }

    fn public(&self) -> PathBuf {
        self.0.with_extension("pub")
    }

    /// Runs a command of cosign that verifies something with the public key, without a network.
    fn verify(&self, words: &[&str], of: &str) -> Output {
        let public = self.public();
        let mut verify = tool("MIRROR_COSIGN");
        verify.args(words).arg("--insecure-ignore-tlog").arg("--key").arg(&public).arg(of);
        // With a key for its log, cosign does not ask the public instance for its keys.
        verify.env("SIGSTORE_REKOR_PUBLIC_KEY", public).output().unwrap()
    }
}

/// The command that makes a release, pushes and signs it.
fn release(registry: &Registry, keys: &Keys, to: &Path) -> Command {
    let mut release = tool("MIRROR_XTASK");
    release.args(["release", "--push", &registry.address, "--output"]).arg(to);
    release.arg("--key").arg(keys.private()).env("COSIGN_PASSWORD", "").stdin(Stdio::null());
    release
}

/// Signatures and attestations are those of the key, and of these artefacts.
#[track_caller]
fn is_signed(keys: &Keys, others: &Keys, files: &Path, image: &str, chart: &str) {
    let sums = files.join("SHA256SUMS");
    let (sums, bundle) = (sums.to_str().unwrap(), format!("--bundle={}.bundle", sums.display()));
    let [signature, provenance, bill, blob]: [&[&str]; 4] = [
        &["verify"],
        &["verify-attestation", "--type", "slsaprovenance1"],
        &["verify-attestation", "--type", "cyclonedx"],
        &["verify-blob", &bundle],
    ];
    for (words, of) in [
        (signature, image),
        (signature, chart),
        (provenance, image),
        (provenance, chart),
        (bill, image),
        (blob, sums),
    ] {
        let output = keys.verify(words, of);
        assert!(output.status.success(), "{words:?} {of}: {output:?}");
        assert!(!others.verify(words, of).status.success(), "{words:?} {of}: accepts another key");
    }
    // The chart has no bill of materials.
    assert!(!keys.verify(bill, chart).status.success());
    let other_file = files.join("images.txt");
    assert!(!keys.verify(blob, other_file.to_str().unwrap()).status.success());
}

/// The blocks of commands in a section of a document.
#[track_caller]
fn blocks<const N: usize>(document: &'static str, heading: &str) -> [&'static str; N] {
    let (_, rest) = document.split_once(&format!("\n## {heading}\n")).unwrap();
    let section = rest.split("\n## ").next().unwrap();
    let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.collect::<Vec<_>>().try_into().unwrap()
}

/// Commands of a document with other texts in place of some. The document must have these.
#[track_caller]
fn changed(commands: &str, changes: &[(&str, String)]) -> String {
    changes.iter().fold(commands.to_owned(), |commands, (from, to)| {
        assert!(commands.contains(from), "the document has no {from:?}: {commands}");
        commands.replace(from, to)
    })
}

/// The shell of a user with kubectl, Helm, cosign and Krew, in a home of their own.
struct Shell<'c> {
    cluster: &'c Cluster,
    home: PathBuf,
    path: String,
}

impl<'c> Shell<'c> {
    #[track_caller]
    fn new(cluster: &'c Cluster) -> Self {
        let home = cluster.host().files().join("home");
        let programs = home.join("bin");
        fs::create_dir_all(&programs).unwrap();
        for (name, program) in [
            ("kubectl", cluster.command("")),
            ("kubectl-krew", tool("MIRROR_KREW")),
            ("helm", tool("MIRROR_HELM")),
            ("cosign", tool("MIRROR_COSIGN")),
        ] {
            symlink(program.get_program(), programs.join(name)).unwrap();
        }
        // Krew's own index, as after `kubectl krew update`: `uninstall` wants one.
        fs::create_dir_all(home.join(".krew/index/default/.git")).unwrap();
        let (of_krew, usual) = (home.join(".krew/bin"), env::var("PATH").unwrap());
        let path = format!("{}:{}:{usual}", programs.display(), of_krew.display());
        Self { cluster, home, path }
    }

    /// The output of commands, or why one has failed. The last program of a pipeline counts.
    fn run(&self, commands: &str) -> Result<String, String> {
        let mut bash = Command::new("timeout");
        bash.args([LONGEST, "bash", "-euc", commands]).current_dir(&self.home).stdin(Stdio::null());
        bash.env_clear().env("HOME", &self.home).env("PATH", &self.path);
        let output = bash.env("KUBECONFIG", self.cluster.kubeconfig()).output().unwrap();
        check(output.status.success(), || format!("{commands}: {output:?}"))?;
        Ok(String::from_utf8(output.stdout).unwrap())
    }
}

/// Signatures and sums are right by the commands of docs/install.md, with a key in place of the workflow's identity.
#[track_caller]
fn is_verified_as_documented(shell: &Shell<'_>, keys: &Keys, registry: &Registry, files: &Path) {
    let [commands] = blocks(INSTALL, "Verify");
    let (signer, commands) = commands.split_once(")\n").unwrap();
    assert!(signer.starts_with("signer=(--certificate-oidc-issuer "), "{signer}");
    let public = keys.public();
    let key = public.display();
    let signer =
        format!("export SIGSTORE_REKOR_PUBLIC_KEY={key}\nsigner=(--key {key} --insecure-ignore-tlog)\n");
    let page = format!("file://{}", files.display());
    let commands = changed(commands, &[(REGISTRY, registry.address.clone()), (PAGE, page)]);
    let told = shell.run(&(signer + &commands)).unwrap();
    assert!(told.ends_with("mirror.yaml: OK\n"), "{told}");
}

/// The installation and the first packets, by the commands of the README. For the namespace `shop` they have that of the
/// story, with its pod `web` and its deployment `checkout`, and tshark for Wireshark, each for one packet.
#[track_caller]
fn is_read_as_documented(shell: &Shell<'_>, registry: &Registry, files: &Path, mirrored: &KubePod) {
    let [commands] = blocks(README, "Install");
    let [same] = blocks(INSTALL, "With Helm");
    assert!(commands.starts_with(same), "{commands}");
    let (commands, checked) = commands.trim_end().rsplit_once('\n').unwrap();
    let archive = files.join(format!("kubectl-mirror-{VERSION}-linux-amd64.tar.gz"));
    let commands = changed(
        commands,
        &[
            (REGISTRY, registry.address.clone()),
            ("--wait", "--wait --plain-http".to_owned()),
            ("--manifest-url", format!("--archive {} --manifest", archive.display())),
            (PAGE, files.display().to_string()),
        ],
    );
    let begun = Instant::now();
    shell.run(&commands).unwrap();
    // An agent writes its first report a moment after it is ready.
    eventually(PATIENCE, || shell.run(checked));

    let namespace = shell.cluster.namespace();
    let one_packet = ("tshark -i -", "tshark -c 1 -i -".to_owned());
    let [tails, alone, annotated] = blocks(README, "First packets");
    let shop = (" shop", format!(" {namespace}"));
    let wireshark = ("wireshark -k", "tshark".to_owned());
    let coredns = ("kube-system deploy/coredns", "shop deploy/checkout".to_owned());
    let tails = changed(tails, &[coredns, shop.clone(), wireshark.clone(), one_packet.clone()]);
    for (number, tail) in tails.lines().enumerate() {
        let shown = shell.run(tail).unwrap();
        assert!(!shown.is_empty(), "{tail}: no packet");
        if number == 0 {
            eprintln!("from the first command of the README to the first packet: {:.1?}", begun.elapsed());
        }
    }
    let shown =
        shell.run(&changed(alone, &[("/shop/", format!("/{namespace}/")), wireshark, one_packet])).unwrap();
    assert!(!shown.is_empty(), "{alone}: no packet");

    let host = shell.cluster.host();
    host.wait_taps(&[&mirrored.device]);
    let web = shell.cluster.running("web");
    let annotated = changed(annotated, &[shop, ("-ni mirror0", "-c 1 -ni mirror0 tcp".to_owned())]);
    let (annotate, read) = annotated.split_once('\n').unwrap();
    shell.run(annotate).unwrap();
    host.wait_taps(&[&mirrored.device, &web.device]);
    let shown = shell.run(read).unwrap();
    let (packet, explanation) = shown.split_once('\n').unwrap();
    assert!(packet.contains(&format!("{}.443", web.ip)) && explanation.contains("web"), "{shown}");
}

#[test]
fn a_release_is_verified_installed_by_its_digest_and_uninstalled() {
    // The story runs all blocks of these documents.
    assert_eq!([README, INSTALL].map(|document| document.matches("```sh\n").count()), [4, 2]);
    let cluster = &Cluster::new("release");
    let (host, shell) = (cluster.host(), &Shell::new(cluster));
    let registry = Registry::start(host.files());
    let [keys, others] = ["release", "others"].map(|name| Keys::make(host.files(), name));

    // The same files twice, each with its sum.
    let [files, again] = ["first", "again"].map(|name| host.files().join(name));
    for to in [&files, &again] {
        // Its steps are seen while it runs, for minutes.
        assert!(release(&registry, &keys, to).status().unwrap().success());
    }
    let read = |directory: &Path, name: &str| fs::read_to_string(directory.join(name)).unwrap();
    let sums = read(&files, "SHA256SUMS");
    assert_eq!(sums, read(&again, "SHA256SUMS"));
    let mut sha256sum = Command::new("sha256sum");
    succeeds(sha256sum.args(["--check", "--strict", "SHA256SUMS"]).current_dir(&files));
    let unsigned = ["SHA256SUMS", "SHA256SUMS.bundle", "provenance.json"];
    for entry in fs::read_dir(&files).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(unsigned.contains(&&*name) || sums.contains(&format!("  {name}\n")), "{name} has no sum");
    }
    for platform in ["linux-amd64", "linux-arm64", "windows-amd64", "darwin-amd64", "darwin-arm64"] {
        let archive = format!("kubectl-mirror-{VERSION}-{platform}.tar.gz");
        assert!(sums.contains(&archive), "{archive}");
    }

    let pinned = read(&files, "images.txt");
    let [image, chart] = pinned.lines().collect::<Vec<_>>()[..] else { unreachable!("{pinned}") };
    is_signed(&keys, &others, &files, image, chart);
    // No release replaces something else of its version: here, the image's signature.
    let tags = host.files().join("registry/docker/registry/v2/repositories/mirror-agent/_manifests/tags");
    let link = |tag: &str| tags.join(tag).join("current/link");
    let published = fs::read(link(VERSION)).unwrap();
    let (_, digest) = image.split_once('@').unwrap();
    fs::copy(link(&format!("{}.sig", digest.replace(':', "-"))), link(VERSION)).unwrap();
    let refused = release(&registry, &keys, &host.files().join("refused")).output().unwrap();
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && told.contains("is published already"), "{refused:?}");
    fs::write(link(VERSION), published).unwrap();
    is_verified_as_documented(shell, &keys, &registry, &files);
    let mut page = Command::new("tar");
    page.arg("-xzOf").arg(files.join(format!("podmirror-{VERSION}.tgz"))).arg("podmirror/README.md");
    let page = succeeds(&mut page);
    assert!(!page.contains("](.") && page.contains(&format!("/blob/v{VERSION}/docs/install.md)")), "{page}");

    // Krew takes the archive only if it has the sum of the manifest.
    let other = files.join(format!("kubectl-mirror-{VERSION}-linux-arm64.tar.gz"));
    let (manifest, other) = (files.join("mirror.yaml"), other.display().to_string());
    let install = format!("kubectl krew install --manifest {} --archive {other}", manifest.display());
    let refused = shell.run(&install).unwrap_err();
    assert!(refused.contains("checksum does not match"), "{refused}");

    // Helm finds the chart, and the node pulls the image by the chart's digest.
    let [web, api, db] = &cluster.pods([("web", None), ("api", Some("true")), ("db", None)]);
    let talk = format!("while true; do timeout 1 wget -q -O /dev/null http://{}:443/; sleep 1; done", web.ip);
    let pod = pod_object("checkout", &talk);
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "checkout" },
        "spec": {
            "replicas": 1, "selector": { "matchLabels": pod["metadata"]["labels"] },
            "template": { "metadata": pod["metadata"], "spec": pod["spec"] },
        },
    }));
    cluster.kubectl(&format!("rollout status deployment/checkout --timeout={}s", PATIENCE.as_secs()));
    cluster.uninstall();
    is_read_as_documented(shell, &registry, &files, api);
    let pulls_the_image = || {
        let of_pods = |path: &str| cluster.kubectl(&format!("get pods -n {AGENT} -o jsonpath={{{path}}}"));
        let wanted = of_pods(".items[*].spec.containers[*].image");
        assert!(!wanted.is_empty() && wanted.split(' ').all(|of| of == image), "{wanted}");
        let pulled = of_pods(".items[*].status.containerStatuses[*].imageID");
        let is_pulled = |of: &str| of.ends_with(&format!("/mirror-agent@{digest}"));
        assert!(pulled.split(' ').all(is_pulled), "{pulled}");
    };
    pulls_the_image();

    let removed = shell.run("kubectl krew uninstall mirror");
    assert!(removed.is_ok() && shell.run("kubectl mirror check").is_err(), "{removed:?}");
    cluster.kubectl("annotate pod web podmirror.io/mirror-");
    host.wait_taps(&[&api.device]);
    let comparison = Comparison::of(&api.netns, host);
    api.ping(db.ip, 5);
    assert_eq!(comparison.is_equal().len(), 10);

    let all = format!("--namespace {AGENT} --wait --timeout {}s", PATIENCE.as_secs());
    cluster.helm(&format!("uninstall {AGENT} {all}"));
    cluster.has_left_nothing();
    // Helm keeps the CRDs, with the objects of users.
    let ours =
        format!("get all,clusterroles,clusterrolebindings -A -l app.kubernetes.io/name={AGENT} -o name");
    eventually(PATIENCE, || {
        let left = cluster.try_kubectl(&ours)?;
        check(left.is_empty(), || left)
    });

    // The same without Helm.
    let manifest = files.join(format!("podmirror-{VERSION}.yaml"));
    cluster.kubectl(&format!("apply -f {}", manifest.display()));
    cluster.wait_rolled_out();
    let ready = format!("--for=condition=Ready --timeout={}s", PATIENCE.as_secs());
    cluster.kubectl(&format!("-n {AGENT} wait pods --all {ready}"));
    host.wait_taps(&[&api.device]);
    pulls_the_image();
    cluster.kubectl(&format!("delete -f {}", manifest.display()));
    cluster.has_left_nothing();
}
