BEGIN TRANSACTION;
CREATE TABLE records (
        id INTEGER PRIMARY KEY,    -- runs.n << 32 | seq
        at INTEGER NOT NULL,
        kind TEXT NOT NULL,
        data TEXT NOT NULL
    );
INSERT INTO "records" VALUES(4294967296,1794840563038,'run_began','{"v":1,"seq":0,"run":"batches","at":1794840563038,"entry":{"kind":"run_began","identity":{"run_id":"batches","depth":0},"system_prompt":"You are in a story.","prompts":[{"role":"user","content":"Go on.","timestamp":1000001}],"tools":{"slow":{"description":"does something","parameters":{"type":"object","properties":{}}},"quick":{"description":"does something","parameters":{"type":"object","properties":{}}},"again":{"description":"does something","parameters":{"type":"object","properties":{}}},"blocking":{"description":"Read a file.","parameters":{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}}}}}');
INSERT INTO "records" VALUES(4294967297,1794840563038,'asked','{"v":1,"seq":1,"run":"batches","at":1794840563038,"entry":{"kind":"asked","turn":1,"messages":1,"digest":"93fd5e2a090b90cd45a167cb","settings":{"system_prompt":"8a33f1257f22a3c254ab1006","tools":{"slow":"2f61f72df90ae1edcea54949","quick":"d02838c266190c8eba4469e2","again":"c41733139ce679f4b562b559","blocking":"70c12cbe016c7b2e0293a1a1"},"temperature":null,"max_output_tokens":null,"reasoning":"minimal","provider_extras":null,"force_tool_call":false}}}');
INSERT INTO "records" VALUES(4294967298,1794840563038,'answered','{"v":1,"seq":2,"run":"batches","at":1794840563038,"entry":{"kind":"answered","message":{"role":"assistant","content":[{"type":"text","text":"All at once."},{"type":"tool_call","id":"t0c1","name":"slow","arguments":{}},{"type":"tool_call","id":"t0c2","name":"quick","arguments":{}},{"type":"tool_call","id":"t0c3","name":"again","arguments":{}},{"type":"tool_call","id":"t0c4","name":"again","arguments":{}}],"stop_reason":"tool_use","usage":{"input_tokens":100,"output_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}},"pieces":[["raw",{"kind":"text","delta":"All "}],["raw",{"kind":"text","delta":"at "}],["raw",{"kind":"text","delta":"once."}]]}}');
INSERT INTO "records" VALUES(4294967299,1794840563039,'tool_started','{"v":1,"seq":3,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","tool_call_id":"t0c1","tool_name":"slow"}}');
INSERT INTO "records" VALUES(4294967300,1794840563039,'tool_started','{"v":1,"seq":4,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","position":1,"tool_call_id":"t0c2","tool_name":"quick"}}');
INSERT INTO "records" VALUES(4294967301,1794840563039,'tool_ended','{"v":1,"seq":5,"run":"batches","at":1794840563039,"entry":{"kind":"tool_ended","position":1,"tool_call_id":"t0c2","result":{"content":[{"type":"text","text":"quick"}]}}}');
INSERT INTO "records" VALUES(4294967302,1794840563039,'tool_started','{"v":1,"seq":6,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","position":2,"tool_call_id":"t0c3","tool_name":"again"}}');
INSERT INTO "records" VALUES(4294967303,1794840563039,'tool_started','{"v":1,"seq":7,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","position":3,"tool_call_id":"t0c4","tool_name":"again"}}');
INSERT INTO "records" VALUES(4294967304,1794840563039,'tool_ended','{"v":1,"seq":8,"run":"batches","at":1794840563039,"entry":{"kind":"tool_ended","position":2,"tool_call_id":"t0c3","result":{"content":[{"type":"text","text":"again"}],"details":{"turns":4}}}}');
INSERT INTO "records" VALUES(4294967305,1794840563039,'tool_ended','{"v":1,"seq":9,"run":"batches","at":1794840563039,"entry":{"kind":"tool_ended","position":3,"tool_call_id":"t0c4","result":{"content":[{"type":"text","text":"again"}],"details":{"turns":4}}}}');
INSERT INTO "records" VALUES(4294967306,1794840563039,'tool_ended','{"v":1,"seq":10,"run":"batches","at":1794840563039,"entry":{"kind":"tool_ended","tool_call_id":"t0c1","result":{"content":[{"type":"text","text":"slow"}],"details":{"turns":9}}}}');
INSERT INTO "records" VALUES(4294967307,1794840563039,'batch_ended','{"v":1,"seq":11,"run":"batches","at":1794840563039,"entry":{"kind":"batch_ended","time":[1000002,1000003,1000004,1000005]}}');
INSERT INTO "records" VALUES(4294967308,1794840563039,'asked','{"v":1,"seq":12,"run":"batches","at":1794840563039,"entry":{"kind":"asked","turn":2,"messages":6,"digest":"b501a3a758d547bbc9ac36cd"}}');
INSERT INTO "records" VALUES(4294967309,1794840563039,'answered','{"v":1,"seq":13,"run":"batches","at":1794840563039,"entry":{"kind":"answered","message":{"role":"assistant","content":[{"type":"tool_call","id":"t1c0","name":"quick","arguments":{"n":1}}],"stop_reason":"tool_use","usage":{"input_tokens":100,"output_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}},"pieces":[]}}');
INSERT INTO "records" VALUES(4294967310,1794840563039,'tool_started','{"v":1,"seq":14,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","tool_call_id":"t1c0","tool_name":"quick"}}');
INSERT INTO "records" VALUES(4294967311,1794840563039,'tool_ended','{"v":1,"seq":15,"run":"batches","at":1794840563039,"entry":{"kind":"tool_ended","tool_call_id":"t1c0","result":{"content":[{"type":"text","text":"quick"}]}}}');
INSERT INTO "records" VALUES(4294967312,1794840563039,'batch_ended','{"v":1,"seq":16,"run":"batches","at":1794840563039,"entry":{"kind":"batch_ended","time":1000006}}');
INSERT INTO "records" VALUES(4294967313,1794840563039,'asked','{"v":1,"seq":17,"run":"batches","at":1794840563039,"entry":{"kind":"asked","turn":3,"messages":8,"digest":"5d40b1547aa3f1eecb5b56b9"}}');
INSERT INTO "records" VALUES(4294967314,1794840563039,'answered','{"v":1,"seq":18,"run":"batches","at":1794840563039,"entry":{"kind":"answered","message":{"role":"assistant","content":[{"type":"tool_call","id":"t2c0","name":"again","arguments":{}},{"type":"tool_call","id":"t2c1","name":"slow","arguments":{}},{"type":"tool_call","id":"t2c2","name":"again","arguments":{}}],"stop_reason":"tool_use","usage":{"input_tokens":100,"output_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}},"pieces":[]}}');
INSERT INTO "records" VALUES(4294967315,1794840563039,'tool_started','{"v":1,"seq":19,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","tool_call_id":"t2c0","tool_name":"again"}}');
INSERT INTO "records" VALUES(4294967316,1794840563039,'tool_started','{"v":1,"seq":20,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","position":1,"tool_call_id":"t2c1","tool_name":"slow"}}');
INSERT INTO "records" VALUES(4294967317,1794840563039,'tool_started','{"v":1,"seq":21,"run":"batches","at":1794840563039,"entry":{"kind":"tool_started","position":2,"tool_call_id":"t2c2","tool_name":"again"}}');
INSERT INTO "records" VALUES(4294967318,1794840563039,'tool_ended','{"v":1,"seq":22,"run":"batches","at":1794840563039,"entry":{"kind":"tool_ended","tool_call_id":"t2c0","result":{"content":[{"type":"text","text":"again"}],"details":{"turns":4}}}}');
INSERT INTO "records" VALUES(4294967319,1794840563040,'tool_ended','{"v":1,"seq":23,"run":"batches","at":1794840563040,"entry":{"kind":"tool_ended","position":2,"tool_call_id":"t2c2","result":{"content":[{"type":"text","text":"again"}],"details":{"turns":4}}}}');
INSERT INTO "records" VALUES(4294967320,1794840563040,'tool_ended','{"v":1,"seq":24,"run":"batches","at":1794840563040,"entry":{"kind":"tool_ended","position":1,"tool_call_id":"t2c1","result":{"content":[{"type":"text","text":"slow"}],"details":{"turns":9}}}}');
INSERT INTO "records" VALUES(4294967321,1794840563040,'batch_ended','{"v":1,"seq":25,"run":"batches","at":1794840563040,"entry":{"kind":"batch_ended","time":[1000007,1000008,1000009]}}');
INSERT INTO "records" VALUES(4294967322,1794840563040,'asked','{"v":1,"seq":26,"run":"batches","at":1794840563040,"entry":{"kind":"asked","turn":4,"messages":12,"digest":"462987837309cf7ac2c9e513"}}');
INSERT INTO "records" VALUES(4294967323,1794840563040,'answered','{"v":1,"seq":27,"run":"batches","at":1794840563040,"entry":{"kind":"answered","message":{"role":"assistant","content":[{"type":"tool_call","id":"t3c0","name":"blocking","arguments":{"path":"x"}}],"stop_reason":"tool_use","usage":{"input_tokens":100,"output_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}},"pieces":[]}}');
INSERT INTO "records" VALUES(4294967324,1794840563040,'tool_started','{"v":1,"seq":28,"run":"batches","at":1794840563040,"entry":{"kind":"tool_started","tool_call_id":"t3c0","tool_name":"blocking"}}');
INSERT INTO "records" VALUES(4294967325,1794840563051,'tool_ended','{"v":1,"seq":29,"run":"batches","at":1794840563051,"entry":{"kind":"tool_ended","tool_call_id":"t3c0","result":{"content":[{"type":"text","text":"[\"x\",\"ä\",\"字\"]"}]}}}');
INSERT INTO "records" VALUES(4294967326,1794840563051,'batch_ended','{"v":1,"seq":30,"run":"batches","at":1794840563051,"entry":{"kind":"batch_ended","time":1000010}}');
INSERT INTO "records" VALUES(4294967327,1794840563051,'asked','{"v":1,"seq":31,"run":"batches","at":1794840563051,"entry":{"kind":"asked","turn":5,"messages":14,"digest":"6ad1424e2f2a610c33ab02d1"}}');
INSERT INTO "records" VALUES(4294967328,1794840563051,'answered','{"v":1,"seq":32,"run":"batches","at":1794840563051,"entry":{"kind":"answered","message":{"role":"assistant","content":[{"type":"text","text":"All is done."}],"stop_reason":"end_turn","usage":{"input_tokens":100,"output_tokens":10,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}},"pieces":[["text",4,3,5]]}}');
INSERT INTO "records" VALUES(4294967329,1794840563051,'run_ended','{"v":1,"seq":33,"run":"batches","at":1794840563051,"entry":{"kind":"run_ended","outcome":"done","usage":{"input_tokens":500,"output_tokens":50,"cache_creation_input_tokens":0,"cache_read_input_tokens":0},"tree_usage":{"input_tokens":500,"output_tokens":50,"cache_creation_input_tokens":0,"cache_read_input_tokens":0}}}');
CREATE TABLE runs (
        n INTEGER PRIMARY KEY,
        run_id TEXT NOT NULL UNIQUE,
        parent_run_id TEXT,
        depth INTEGER NOT NULL DEFAULT 0,
        conversation_id TEXT,
        began_at INTEGER NOT NULL,
        last_at INTEGER,           -- this and last_seq: as they were when it was closed
        first_seq INTEGER NOT NULL,
        last_seq INTEGER,
        outcome TEXT,
        version INTEGER NOT NULL,  -- of its records
        is_open INTEGER NOT NULL DEFAULT 1,
        indexed INTEGER NOT NULL DEFAULT 0  -- the first number that is not in the index
    );
INSERT INTO "runs" VALUES(1,'batches',NULL,0,NULL,1794840563038,1794840563051,0,33,'done',1,0,0);
CREATE INDEX runs_by_time ON runs (began_at);
CREATE INDEX runs_by_parent ON runs (parent_run_id, began_at) WHERE parent_run_id IS NOT NULL;
CREATE INDEX runs_by_conversation ON runs (conversation_id, began_at)
        WHERE conversation_id IS NOT NULL;
CREATE INDEX runs_to_index ON runs (n) WHERE is_open OR indexed <= last_seq;
CREATE VIEW entries AS
        SELECT run_id, id & 4294967295 AS seq, at, kind, data
        FROM records JOIN runs ON runs.n = id >> 32;
COMMIT;
PRAGMA application_id=1129075275;
PRAGMA user_version=1;
