//! Tests of the watcher, with real files in a temporary directory.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::{io::Write, os::unix::fs::symlink};

use tempfile::{NamedTempFile, TempDir};
use tokio::time::timeout;
use tracing::subscriber::DefaultGuard;

use super::*;

const DEADLINE: Duration = Duration::from_secs(10);

/// A directory with a pods file, and the log lines of the test's thread.
struct Desk {
    directory: TempDir,
    path: PathBuf,
    log: NamedTempFile,
    _guard: DefaultGuard,
}

impl Desk {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pods.yaml");
        let log = NamedTempFile::new().unwrap();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(log.reopen().unwrap())).finish();
        Self { directory, path, log, _guard: tracing::subscriber::set_default(subscriber) }
    }

    fn file(&self) -> PodFile {
        PodFile::watch(&self.path).unwrap()
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn rename_to(&self, text: &str) {
        fs::write(self.beside("pods.yaml.tmp"), text).unwrap();
        fs::rename(self.beside("pods.yaml.tmp"), &self.path).unwrap();
    }

    fn log(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap()
    }

    fn errors(&self) -> Vec<String> {
        self.log().lines().filter(|line| line.contains("ERROR")).map(Into::into).collect()
    }
}

fn pods(names: &[&str]) -> String {
    names.iter().map(|name| format!("---\nkind: Pod\nmetadata: {{name: {name}}}\n")).collect()
}

fn names(file: &PodFile) -> Option<Vec<String>> {
    file.snapshot().map(|pods| pods.iter().map(|pod| pod.id.name.clone()).collect())
}

/// Waits for the next list of pods.
async fn changed(file: &mut PodFile) -> Vec<String> {
    timeout(DEADLINE, file.changed()).await.expect("the change of the file is noticed");
    names(file).unwrap()
}

/// Waits until the file is invalid for a reason that contains `text`. The pods do not change.
async fn bad(file: &mut PodFile, text: &str) {
    let before = file.snapshot();
    let noticed = async {
        while !file.problem.as_deref().is_some_and(|problem| problem.contains(text)) {
            if file.news().await {
                assert!(!file.load());
            }
        }
    };
    let noticed = timeout(DEADLINE, noticed).await;
    assert!(noticed.is_ok(), "found {:?}, not {text}", file.problem);
    assert_eq!(file.snapshot(), before, "the last good list stays");
}

#[tokio::test]
async fn a_file_that_is_written_in_place_is_read_when_it_is_closed() {
    let desk = Desk::new();
    fs::write(&desk.path, pods(&["a"])).unwrap();
    let mut file = desk.file();
    let text = pods(&["b", "c"]);
    let mut writer = fs::File::create(&desk.path).unwrap();
    for part in text.as_bytes().chunks(7) {
        writer.write_all(part).unwrap();
        writer.flush().unwrap();
        // Other files in the directory do not cause a read.
        fs::write(desk.beside("other"), part).unwrap();
        assert!(futures_util::poll!(std::pin::pin!(file.changed())).is_pending());
    }
    drop(writer);
    assert_eq!(changed(&mut file).await, ["b", "c"]);
    assert!(desk.errors().is_empty(), "{:?}", desk.errors());
}

#[tokio::test]
async fn a_bad_file_is_told_of_once_and_a_good_one_is_taken_up() {
    let desk = Desk::new();
    fs::write(&desk.path, pods(&["a"])).unwrap();
    let mut file = desk.file();

    fs::write(&desk.path, "kind: Service\n").unwrap();
    bad(&mut file, "\"Service\" is not a Pod").await;
    for _ in 0..3 {
        fs::write(&desk.path, "kind: Service\n").unwrap();
    }
    desk.rename_to("kind: [");
    bad(&mut file, "line 1, column 7").await;
    let errors = desk.errors();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("the pods file is bad; the last good list of pods stays in force"));
    assert!(errors[0].contains(desk.path.to_str().unwrap()) && errors[0].contains("line 1, column 1"));

    desk.rename_to(&pods(&["a", "b"]));
    assert_eq!(changed(&mut file).await, ["a", "b"]);
    let log = desk.log();
    assert!(log.lines().last().unwrap().contains("read the pods file") && log.contains("pods=2"), "{log}");
}

#[tokio::test]
async fn a_file_that_is_missing_or_bad_at_first_gives_no_list() {
    let desk = Desk::new();
    let mut file = desk.file();
    assert_eq!(file.snapshot(), None);
    fs::write(&desk.path, "").unwrap();
    bad(&mut file, "the file is empty").await;
    assert_eq!(file.snapshot(), None);
    let errors = desk.errors();
    assert_eq!(errors.len(), 2, "{errors:?}");
    assert!(errors[0].contains("there is no list of pods yet") && errors[0].contains("No such file"));
    fs::write(&desk.path, pods(&["a"])).unwrap();
    assert_eq!(changed(&mut file).await, ["a"]);
}

#[tokio::test]
async fn a_directory_that_is_deleted_and_made_again_is_watched_again() {
    let desk = Desk::new();
    let directory = desk.beside("inner");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("pods"), pods(&["a"])).unwrap();
    let mut file = PodFile::watch(&directory.join("pods")).unwrap();
    fs::remove_dir_all(&directory).unwrap();
    bad(&mut file, "No such file").await;
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("pods"), pods(&["b"])).unwrap();
    assert_eq!(changed(&mut file).await, ["b"]);
    fs::write(directory.join("pods"), pods(&["c"])).unwrap();
    assert_eq!(changed(&mut file).await, ["c"]);
    assert_eq!(desk.errors().len(), 1, "{:?}", desk.errors());
}

#[tokio::test]
async fn the_links_of_a_config_map_volume_are_followed() {
    let desk = Desk::new();
    let version = |name: &str, text: &str| {
        fs::create_dir(desk.beside(name)).unwrap();
        fs::write(desk.beside(name).join("pods.yaml"), text).unwrap();
        symlink(name, desk.beside("..data_tmp")).unwrap();
        fs::rename(desk.beside("..data_tmp"), desk.beside("..data")).unwrap();
    };
    version("..1", &pods(&["a"]));
    symlink("..data/pods.yaml", &desk.path).unwrap();
    let mut file = desk.file();
    assert_eq!(names(&file).unwrap(), ["a"]);
    version("..2", &pods(&["b"]));
    fs::remove_dir_all(desk.beside("..1")).unwrap();
    assert_eq!(changed(&mut file).await, ["b"]);

    // The link is removed and created again, not renamed.
    fs::remove_file(&desk.path).unwrap();
    bad(&mut file, "No such file").await;
    version("..3", &pods(&["c"]));
    symlink("..data/pods.yaml", &desk.path).unwrap();
    assert_eq!(changed(&mut file).await, ["c"]);
}

/// A tenant's pod claims the hash of a static pod. Its object is in the file before, with and after the API copy of the
/// static pod, which alone has logs.
#[tokio::test]
async fn a_static_pod_has_the_uid_of_its_cgroups_where_the_kubelet_has_its_logs() {
    const HASH: &str = "0123456789abcdef0123456789abcdef";
    let desk = Desk::new();
    fs::create_dir(desk.beside(&format!("kube-system_etcd_{HASH}"))).unwrap();
    let pod = |namespace: &str, name: &str, hash: &str| {
        format!(
            "---\nkind: Pod\nmetadata: {{name: {name}, namespace: {namespace}, uid: api-{name}, annotations: \
             {{kubernetes.io/config.hash: '{hash}', kubernetes.io/config.mirror: '{hash}'}}}}\n"
        )
    };
    let (etcd, mine) = (pod("kube-system", "etcd", HASH), pod("shop", "mine", HASH));
    let others = pod("shop", "short", "api-mine") + &pod("shop", "proxy", "fedcba9876543210fedcba9876543210");
    fs::write(&desk.path, mine.clone()).unwrap();
    let mut file = desk.file();
    file.static_pods = Mutex::new(StaticPods::with_logs(desk.directory.path().to_owned()));
    let uids = |file: &PodFile| -> Vec<_> {
        file.snapshot().unwrap().iter().map(|pod| pod.id.uid.clone()).collect()
    };
    assert_eq!(uids(&file), ["api-mine"]);
    for (text, expected) in [
        (mine.clone() + &etcd, vec!["api-mine", HASH]),
        (etcd.clone() + &mine + &others, vec![HASH, "api-mine", "api-short", "api-proxy"]),
        (etcd, vec![HASH]),
        (mine, vec!["api-mine"]),
    ] {
        desk.rename_to(&text);
        changed(&mut file).await;
        assert_eq!(uids(&file), expected);
    }
    assert!(desk.errors().is_empty(), "{:?}", desk.errors());
}

#[tokio::test]
async fn a_wait_that_is_cancelled_loses_nothing() {
    let desk = Desk::new();
    fs::write(&desk.path, pods(&["a"])).unwrap();
    let mut file = desk.file();
    for name in ["b", "c", "d"] {
        assert!(futures_util::poll!(std::pin::pin!(file.changed())).is_pending());
        desk.rename_to(&pods(&[name]));
        assert_eq!(changed(&mut file).await, [name]);
    }
}

#[tokio::test]
async fn what_cannot_be_watched_or_is_no_file_is_an_error() {
    let desk = Desk::new();
    let error = PodFile::watch(&desk.beside("missing/pods.yaml")).err().unwrap();
    let error = format!("{error:#}");
    assert!(error.contains("missing/pods.yaml: No such file or directory"), "{error}");
    let error = PodFile::watch(Path::new("/")).err().unwrap();
    assert_eq!(error.to_string(), "cannot watch the pods file /: that is a directory");

    fs::create_dir(&desk.path).unwrap();
    assert_eq!(desk.file().problem.unwrap(), "not a regular file");
    fs::remove_dir(&desk.path).unwrap();
    fs::write(&desk.path, b"kind: \xff").unwrap();
    assert!(desk.file().problem.unwrap().contains("valid UTF-8"));
}
