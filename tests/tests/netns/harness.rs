//! Tests of the harness: the properties on which the stories rely.

use std::{fs, path::Path};

use mirror_tests::Capture;

use crate::Node;

#[test]
fn nothing_is_left_of_a_lab() {
    let node = Node::bridged("nothing-left");
    let mut paths = [&node.web, &node.db].map(|pod| pod.netns().path().to_owned()).to_vec();
    paths.extend([node.lab.node().path(), node.lab.bpffs(), node.lab.files()].map(Path::to_owned));
    assert!(paths.iter().all(|path| path.exists()));
    let failed = std::thread::spawn(move || {
        let node = node;
        let _capture = Capture::start(node.web.netns(), "eth0");
        assert!(node.lab.devices().is_empty(), "this test fails on purpose");
    });
    assert!(failed.join().is_err());
    for path in paths {
        assert!(fs::symlink_metadata(&path).is_err(), "{} is still there", path.display());
    }
}
