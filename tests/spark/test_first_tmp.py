import pyarrow as pa, lance, lancewal, time
from pyspark.sql import functions as F
from lancewal.spark import *
def test_all(spark, tmp_path):
    t=time.time()
    uri=str(tmp_path/"t")
    df=spark.range(1000).select(F.col("id"), F.concat(F.lit("n"),F.col("id")).alias("name"), F.array(F.col("id").cast("float"),F.lit(1.0).cast("float")).alias("v"))
    df.write.format("lancewal").mode("append").option("createIfMissing","true").option("primaryKey","id").option("numBuckets",4).option("vectorDimensions","v:2").save(uri)
    print("write",time.time()-t); t=time.time()
    out=spark.read.format("lancewal").load(uri); out.printSchema()
    assert out.count()==1000
    print("read",time.time()-t); t=time.time()
    assert out.filter("id in (5,6) and name like 'n%'").count()==2
    out.filter("id in (5,6)").explain()
    print("filter",time.time()-t); t=time.time()
    write(df.filter("id<10").withColumn("name",F.lit("new")), uri)
    print("walwrite",time.time()-t); t=time.time()
    r=spark.read.format("lancewal").load(uri).filter("name='new'").count(); assert r==10
    print(flush(spark,uri)); print("flush",time.time()-t); t=time.time()
    print(compact(spark,uri)); print("compact",time.time()-t); t=time.time()
    print(gc(spark,uri)); print("gc",time.time()-t); t=time.time()
    assert spark.read.format("lancewal").load(uri).filter("name='new'").count()==10
    assert spark.read.format("lancewal").load(uri).count()==1000
    ch=spark.read.format("lancewal").option("readChangeFeed","true").load(uri)
    ch.show(3); assert ch.count()==1010
    print("feed",time.time()-t); t=time.time()
    assert sorted(lancewal.open(uri).scan().to_table()["id"].to_pylist())==list(range(1000))
