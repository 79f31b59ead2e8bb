//! Goal: a session's two segments carry requests, completions, tables and wakes between two
//! mappings, and a segment that is not exactly as agreed is refused with the cause.

use orbitkv_shm_protocol::ids::{Epoch, OperationId, SessionId};
use orbitkv_shm_protocol::layout::Geometry;
use orbitkv_shm_protocol::record::{Completion, Request, RequestBody, RequestKind};
use orbitkv_shm_protocol::segment::{Expected, attach, create};

const SESSION: SessionId = SessionId(7);
const EPOCH: Epoch = Epoch(0x1234_5678);

#[test]
fn a_request_and_its_completion_cross_two_mappings() {
    let geometry = Geometry::default();
    let (mut manager, descriptors) = create(geometry, SESSION, EPOCH).unwrap();
    let expected = Expected::new(geometry, SESSION, EPOCH);
    let mut engine = attach(descriptors.submission, descriptors.completion, expected).unwrap();

    let operation = OperationId { index: 3, generation: 9 };
    let request =
        Request { operation, deadline_ms: 5, range: Default::default(), body: RequestBody::Ping };
    engine.requests.push(|sequence| request.encode(SESSION, EPOCH, sequence)).unwrap();
    assert_eq!(manager.requests.pop().unwrap(), None);
    assert!(engine.requests.publish());
    let record = manager.requests.pop().unwrap().unwrap();
    record.check_addressed_to(SESSION, EPOCH).unwrap();
    assert_eq!(Request::decode(&record).unwrap(), request);
    assert!(manager.requests.release());

    let completion = Completion::ok(operation, RequestKind::Ping);
    manager.completions.push(|sequence| completion.encode(SESSION, EPOCH, sequence)).unwrap();
    assert!(manager.completions.publish());
    let record = engine.completions.pop().unwrap().unwrap();
    assert_eq!(Completion::decode(&record).unwrap(), completion);
    assert!(engine.completions.release());
}
